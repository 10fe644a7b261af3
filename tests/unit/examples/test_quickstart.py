"""Files of the quick start in the repository: tasks, tokenizer, warm-started models, argument files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from examples.quickstart.prepare import main
from examples.quickstart.tasks import REVERSE, SORT, TASKS, Task
from examples.quickstart.tokenizer import VOCABULARY, build_tokenizer

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@EACH_TASK
def test_splits_are_disjoint_repeatable_and_right(task: Task) -> None:
    train, test = task.split()
    assert (len(train), len(test)) == (task.train_size, task.test_size)
    assert len({example.prompt for example in (*train, *test)}) == task.train_size + task.test_size
    assert task.split() == (train, test)


def test_the_labels() -> None:
    assert (REVERSE.example("52814").prompt, REVERSE.example("52814").label) == ("rev 52814", "41825")
    assert (SORT.example("5281").prompt, SORT.example("5281").label) == ("sort 5281", "1258")


def test_prepare_writes_the_data_and_leaves_what_is_there(tmp_path: Path) -> None:
    for name in TASKS:  # a model that is there already is not trained again
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text("{}")
    assert main(["--output", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "reverse" / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 256
    assert rows[0]["prompt"][0]["role"] == "user"
    assert rows[0]["label"] == rows[0]["prompt"][0]["content"].split()[1][::-1]
    (tmp_path / "sort" / "train.jsonl").write_text("mine")
    main(["--task", "sort", "--output", str(tmp_path)])
    assert (tmp_path / "sort" / "train.jsonl").read_text() == "mine"


def test_vocabulary_has_64_tokens_and_one_per_character(tokenizer) -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == len(tokenizer) == 64
    assert tokenizer.convert_ids_to_tokens(list(range(64))) == list(VOCABULARY)
    assert tokenizer("rev 52814", add_special_tokens=False)["input_ids"] == [VOCABULARY.index(c) for c in "rev 52814"]


@EACH_TASK
def test_every_prompt_has_twelve_tokens_and_one_bos(task: Task, tokenizer) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": task.example("0" * task.length).prompt}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    assert len(ids) == 12
    assert ids.count(1) == 1


def test_template_has_a_tool_form_that_extends_the_sampled_tokens(tokenizer) -> None:
    # covers: M14
    turns = [
        {"role": "user", "content": "17*4+3="},
        {"role": "assistant", "content": "<call>17*4</call>"},
        {"role": "tool", "content": "68"},
        {"role": "assistant", "content": "71"},
    ]

    def ids(count: int, generate: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(turns[:count], add_generation_prompt=generate, return_dict=True)[
            "input_ids"
        ]

    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<bos><|user|>17*4+3=<|assistant|><call>17*4</call><eos><|tool|>68<|assistant|>71<eos>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids(4)
    longer = ids(4)
    for shorter in (ids(1, True), ids(2), ids(3, True)):
        assert longer[: len(shorter)] == shorter


@EACH_TASK
def test_shipped_model_is_a_tied_fp32_qwen3_of_the_task(task: Task) -> None:
    config = json.loads((QUICKSTART / "assets" / task.name / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"]["rope_theta"] == 10_000.0
    assert (config["hidden_size"], config["head_dim"]) == (task.model.hidden, task.model.head_dim)
    tensors = load_file(QUICKSTART / "assets" / task.name / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    assert "lm_head.weight" not in tensors
    assert sum(tensor.size for tensor in tensors.values()) == {"reverse": 303_872, "sort": 78_208}[task.name]


@pytest.mark.parametrize(
    "model", ["quickstart/assets/reverse/model", "quickstart/assets/sort/model", "tool_model/model"]
)
def test_shipped_tokenizer_is_the_one_of_the_source(model: str, tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    shipped = QUICKSTART.parent / model
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (shipped / name).read_text() == (tmp_path / name).read_text()


@EACH_TASK
def test_shipped_model_loads_offline_and_starts_where_rl_can_learn(task: Task) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.quickstart.warm_start import accuracy

    directory = QUICKSTART / "assets" / task.name / "model"
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    _, test = task.split()
    lowest, highest = task.warm_start.accepted_reward
    assert lowest <= accuracy(model, tokenizer, task, test, samples=4) <= highest


@EACH_TASK
def test_argument_file_is_valid_and_names_the_shipped_assets(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_async.arguments.parser import parse_arguments

    monkeypatch.chdir(QUICKSTART.parents[1])
    arguments = parse_arguments([f"@examples/quickstart/{task.name}.args"]).arguments
    assert arguments.model.hf_checkpoint.is_dir()
    assert arguments.data.prompt_data == (f"examples/quickstart/assets/{task.name}/train.jsonl",)
    assert arguments.rollout.rollout_max_response_len == task.max_response_length
    assert arguments.staleness.max_weight_staleness == 2
    assert arguments.algorithm.use_rollout_logprobs
