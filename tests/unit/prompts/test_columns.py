"""Columns of prompt files as slime and verl write them: tools, nested fields, several answers, rows by number.

# covers: P8
"""

from __future__ import annotations

import datetime
import decimal
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from miles_async.arguments import Arguments, CheckpointArguments
from miles_async.arguments.data import DataArguments
from miles_async.arguments.evaluation import parse_data_sets
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.prompts.examples import ExampleSource
from miles_async.prompts.source import FilePromptSource
from miles_async.runs.prompt_checks import check_prompts
from miles_async.types import Prompt
from tests.fakes.chat_formats import chat_format
from tests.unit.prompts.row_files import prompts, refusal, write

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "1 + 1"}]


class TestTools:
    def test_are_rendered_with_the_prompt(self, file: Path) -> None:
        write(file, [{"prompt": QUESTION, "label": "2", "tools": [TOOL]}])
        [prompt] = prompts(file, tool_key="tools")
        expected = chat_format("qwen3").encode(QUESTION, [TOOL])
        assert prompt.token_ids == expected != chat_format("qwen3").encode(QUESTION)
        assert prompt.metadata == {"tools": [TOOL]}
        assert prompts(file)[0].metadata == {}

    def test_may_be_json_and_be_absent(self, tmp_path: Path) -> None:
        rows = [{"prompt": QUESTION, "label": "2"}, {"prompt": QUESTION, "label": "2", "tools": json.dumps([TOOL])}]
        plain, with_tools = prompts(write(tmp_path / "p.jsonl", rows), tool_key="tools")
        assert plain.token_ids == chat_format("qwen3").encode(QUESTION)
        assert with_tools.token_ids == chat_format("qwen3").encode(QUESTION, [TOOL])

    def test_are_what_an_example_is_learned_with(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.jsonl", [{"prompt": QUESTION, "label": "2", "tools": [TOOL]}])
        arguments = DataArguments(prompt_data=(str(path),), tool_key="tools")
        [example] = ExampleSource(arguments, chat_format("qwen3"), 10_000).take(1)
        begin = chat_format("qwen3").encode(QUESTION, [TOOL])
        assert tuple(example.branches[0].tokens[: len(begin)]) == begin

    @pytest.mark.parametrize(
        ("value", "flags", "message"),
        [
            ("[1]", {}, "p.jsonl:1: 'tools' (--tool-key) must be a list of objects; found list [1]"),
            ("{", {}, "p.jsonl:1: 'tools' (--tool-key) must be a list of objects, or one as JSON: "),
            ([TOOL], {"apply_chat_template": False, "input_key": "text"}, "need the chat template: leave --no-apply"),
            ([TOOL], {"tool_key": "functions"}, "p.jsonl:1: no key 'functions' (--tool-key); keys of this row: label"),
        ],
    )
    def test_wrong_ones(self, value: object, flags: dict[str, object], message: str, tmp_path: Path) -> None:
        path = write(tmp_path / "p.jsonl", [{"prompt": QUESTION, "text": "a", "label": "2", "tools": value}])
        assert message in refusal(path, **{"tool_key": "tools", **flags})


def test_metadata_of_the_usual_name_may_be_absent(file: Path) -> None:
    write(file, [{"prompt": QUESTION, "label": "2"}])
    assert prompts(file, metadata_key="metadata")[0].metadata == {}
    assert "'extra' (--metadata-key)" in refusal(file, metadata_key="extra")


@pytest.mark.parametrize("part", ["", "@[0:1]"])
def test_metadata_of_tables_is_what_a_checkpoint_can_keep(part: str, tmp_path: Path) -> None:
    """Attempts that are owed at a checkpoint are kept as JSON, and rewards should not see other types after a resume.

    # covers: C9
    """
    more = {
        "at": datetime.datetime(2026, 1, 2, 3, 4),
        "day": datetime.date(2026, 1, 2),
        "raw": b"\x00\xff",
        "price": decimal.Decimal("1.50"),
        "tolerance": float("nan"),
        "answer": decimal.Decimal("2.00"),
        "deep": [{"at": datetime.time(3, 4)}],
    }
    path = write(tmp_path / "p.parquet", [{"prompt": QUESTION, "extra": more}])
    [prompt] = prompts(Path(f"{path}{part}"), label_key="extra.answer", metadata_key="extra")
    assert prompt.metadata == {
        "at": "2026-01-02T03:04:00",
        "day": "2026-01-02",
        "raw": "AP8=",
        "price": "1.50",
        "tolerance": None,
        "answer": "2.00",
        "deep": [{"at": "03:04:00"}],
    }
    assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt) == prompt
    assert prompt.label == "2"


VERL_ROW = {"data_source": "s", "prompt": QUESTION, "reward_model": {"ground_truth": "2", "style": "rule"}}


class TestNestedKeys:
    def test_lead_into_columns(self, file: Path) -> None:
        row = {**VERL_ROW, "extra_info": {"index": 7, "question": "1 + 1", "more": {"level": 3}}}
        write(file, [row])
        [prompt] = prompts(
            file,
            input_key="extra_info.question",
            label_key="reward_model.ground_truth",
            prompt_id_key="extra_info.index",
            metadata_key="extra_info.more",
        )
        assert (prompt.text, prompt.label, prompt.prompt_id) == ("1 + 1", "2", "7")
        assert prompt.metadata == {"level": 3}

    def test_a_column_of_that_name_comes_first(self, file: Path) -> None:
        write(file, [{**VERL_ROW, "reward_model.ground_truth": "3"}])
        assert prompts(file, label_key="reward_model.ground_truth")[0].label == "3"

    @pytest.mark.parametrize("key", ["reward_model.answer", "reward_model.style.x", "rewards.ground_truth"])
    def test_that_lead_nowhere(self, key: str, file: Path) -> None:
        message = refusal(write(file, [VERL_ROW]), label_key=key)
        assert f"'{key}' (--label-key" in message
        assert ("reward_model.ground_truth, reward_model.style" in message) is key.startswith("reward_model.")


class TestSeveralAnswers:
    def test_are_the_label(self, file: Path) -> None:
        rows = [{"prompt": QUESTION, "label": ["2", "two"]}, {"prompt": QUESTION, "label": ["2"]}]
        assert [prompt.label for prompt in prompts(write(file, rows))] == [("2", "two"), "2"]

    def test_wrong_ones(self, tmp_path: Path) -> None:
        for label in ([], [["2"]], [None], ["2", {"a": 1}]):
            message = refusal(write(tmp_path / "p.jsonl", [{"prompt": QUESTION, "label": label}]))
            assert "p.jsonl:1: 'label' (--label-key) must be a text or a number, or a list of accepted ones" in message


@pytest.mark.parametrize(
    "answers",
    [pyarrow.list_(pyarrow.float32()), pyarrow.large_list(pyarrow.float32()), pyarrow.list_(pyarrow.float32(), 2)],
    ids=str,
)
def test_short_floats_are_labels_in_objects_and_lists_too(answers: pyarrow.DataType, tmp_path: Path) -> None:
    kind = pyarrow.struct([("answers", answers), ("style", pyarrow.string())])
    column = pyarrow.array([{"answers": [0.1, 42], "style": "a"}], kind)
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "reward_model": column}), path)
    assert prompts(path, label_key="reward_model.answers")[0].label == ("0.1", "42")


class TestRowsByNumber:
    @pytest.mark.parametrize(
        ("text", "labels"),
        [
            ("@[0:2]", ["0", "1"]),
            ("@[3:]", ["3", "4"]),
            ("@[:1]", ["0"]),
            ("@[-2:]", ["3", "4"]),
            ("@[3:99]", ["3", "4"]),
        ],
    )
    def test_are_those_of_the_file(self, text: str, labels: list[str], file: Path) -> None:
        write(file, [{"prompt": QUESTION, "label": str(number)} for number in range(5)])
        found = prompts(file.with_name(file.name + text))
        assert [prompt.label for prompt in found] == labels
        assert [prompt.prompt_id for prompt in found] == [f"{file.name}:{int(label) + 1}" for label in labels]

    def test_wrong_ones(self, file: Path) -> None:
        write(file, [{"prompt": QUESTION, "label": "2"}])
        assert refusal(Path(f"{file}@[3:5]")) == f"{file}@[3:5]: holds no prompts, the file has 1 rows"
        for text in ("@[5]", "@[0:1:2]", "@[a:b]", "@[0:1"):
            with pytest.raises(ConfigurationError, match=r"such as p\.\w+@\[0:100\] for the first 100 rows"):
                prompts(Path(f"{file}{text}"))

    def test_a_run_does_not_go_on_with_other_rows(self, file: Path) -> None:
        write(file, [{"prompt": QUESTION, "label": str(number)} for number in range(5)])
        encode = chat_format("qwen3").encode
        state = FilePromptSource(DataArguments(prompt_data=(f"{file}@[0:2]",)), encode).state()
        with pytest.raises(CheckpointError, match="Restore --prompt-data"):
            FilePromptSource(DataArguments(prompt_data=(f"{file}@[2:4]",)), encode).restore(state)

    def test_of_held_out_files(self) -> None:
        assert parse_data_sets(["a/t.jsonl@[0:10]"]) == {"t": "a/t.jsonl@[0:10]"}
        with pytest.raises(ConfigurationError, match=r"--eval-prompt-data t\.parquet@\[1\]: expected FILE@"):
            parse_data_sets(["t.parquet@[1]"])


@pytest.mark.parametrize("kind", ["rewards", "examples"])
def test_a_dry_run_refuses_a_checkpoint_with_other_rows(kind: str, tmp_path: Path) -> None:
    """As the resumed run does, with rewards and with ``--loss-type sft_loss``."""
    # covers: C9
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "label": "1"}])
    data, directory = DataArguments(prompt_data=(str(path),)), tmp_path / "iter_0000005"
    cursor = FilePromptSource(data, lambda content, tools: (1,)).state()
    directory.mkdir()
    (directory / "position.json").write_text('{"step": 5, "version": 0, "run": "r"}')
    name, content = ("examples.json", cursor) if kind == "examples" else ("rollout.json", {"source": cursor})
    (directory / name).write_text(json.dumps(content))
    arguments = Arguments(data=data, checkpoint=CheckpointArguments(load=directory))
    if kind == "examples":
        arguments = replace(arguments, algorithm=replace(arguments.algorithm, loss_type="sft_loss"))
    check_prompts(arguments)
    write(path, [{"prompt": "b", "label": "1"}])
    with pytest.raises(ConfigurationError, match=r"p\.jsonl: cannot continue in the middle of other prompts"):
        check_prompts(arguments)
    accepted = replace(arguments, checkpoint=replace(arguments.checkpoint, load_anyway=("prompt_data",)))
    assert "prompt_data: digest was" in check_prompts(accepted)[1][0]


def test_a_dry_run_counts_rows_without_the_columns_they_may_lack(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", "metadata": {"level": 3}}])
    data = DataArguments(prompt_data=(str(path),), label_key=None, metadata_key="metadata", tool_key="tools")
    assert check_prompts(Arguments(data=data)) == (
        {str(path): 2},
        [
            f"{path}: 1 of 2 rows have no 'metadata' (--metadata-key)",
            f"{path}: 2 of 2 rows have no 'tools' (--tool-key)",
        ],
    )
