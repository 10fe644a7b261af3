"""A resumed run goes on with the model that was saved: all of what it computes and samples is compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.model import ModelArguments
from miles_async.checkpoints.files import find_checkpoint
from miles_async.checkpoints.manifest import RunIdentity, check_whole, fingerprint, write_manifest
from miles_async.checkpoints.model_function import model_function
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.errors import CheckpointError
from miles_async.seams import Resumption
from tests.unit.checkpoints.test_checkpoints import Side, save

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "repetition_penalty": 1.05}
TOKENIZER = {"version": "1.0", "model": {"vocab": {"a": 0, "b": 1}}, "padding": None}
IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "image_mean": [0.5, 0.5, 0.5]}
SETTINGS = {"eos_token": "<e>", "chat_template": "{{ messages }}", "model_max_length": 9}
FILES = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": SETTINGS,
    "preprocessor_config.json": IMAGES,
}


class Rollout(Side):
    """Rollout side that records the accepted changes."""

    async def load(self, directory: Path, *_: Resumption, **__: object) -> None:
        (resumption,) = _
        self.accepted = resumption.accepted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def change(directory: Path, file: str, **fields: object) -> None:
    (directory / file).write_text(json.dumps({**FILES[file], **fields}, indent=2))


async def save_as(model: Path, saved: Path, critic: Path | None = None) -> None:
    await save("mine", 10, save=saved)
    identity = RunIdentity(run="mine", model=fingerprint(ModelArguments(hf_checkpoint=model), critic), ranks={})
    write_manifest(saved / "iter_0000010", identity, 10, {})


async def resumed(model: Path, saved: Path, *anyway: str, critic: Path | None = None) -> str:
    """Why a run of ``model`` does not resume from what was saved; empty if it does."""
    try:
        check_whole(find_checkpoint(saved), fingerprint(ModelArguments(hf_checkpoint=model), critic), anyway)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("file", "fields", "name", "said"),
    [
        ("config.json", {"rope_theta": 500.0}, "rope_theta", "rope_theta was 10000.0 and is 500.0"),
        ("config.json", {"rms_norm_eps": 1e-5}, "rms_norm_eps", "was 1e-06 and is 1e-05"),
        ("config.json", {"sliding_window": 64}, "sliding_window", "was absent and is 64"),
        ("config.json", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling", "was absent"),
        ("config.json", {"architectures": ["Other"]}, "architectures", 'was absent and is ["Other"]'),
        ("config.json", {"rope_interleave": False}, "rope_interleave", "was absent and is false"),
        ("config.json", {"eos_token_id": 3}, "eos_token_id", "was [1, 2] and is [1, 2, 3]"),
        ("generation_config.json", {"eos_token_id": [1]}, "eos_token_id", "was [1, 2] and is [1]"),
        ("generation_config.json", {"repetition_penalty": 1.2}, "generation.repetition_penalty", "is 1.2"),
        ("tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}}}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"eos_token": "<f>"}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<t>"]}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<t>"}}}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}, "tokenizer", "tokenizer was"),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0] }}"}, "chat_template", "chat_template was"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }} "}, "chat_template", "chat_template was"),
        ("preprocessor_config.json", {"image_mean": [0.4, 0.4, 0.4]}, "images.image_mean", "and is [0.4, 0.4, 0.4]"),
        ("preprocessor_config.json", {"max_pixels": 9}, "images.max_pixels", "was absent and is 9"),
    ],
)
async def test_another_model_of_the_same_shapes_is_refused(
    model: Path, tmp_path: Path, file: str, fields: dict[str, object], name: str, said: str
) -> None:
    # covers: C12
    await save_as(model, tmp_path / "saved")
    assert await resumed(model, tmp_path / "saved") == ""
    change(model, file, **fields)
    refusal = await resumed(model, tmp_path / "saved")
    assert said in refusal
    assert refusal.endswith(f"add --load-anyway {name}")
    assert await resumed(model, tmp_path / "saved", "something_else") == refusal
    assert await resumed(model, tmp_path / "saved", name) == ""


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"torch_dtype": "bfloat16", "transformers_version": "5.0.0", "use_cache": False}),
        ("config.json", {"rope_scaling": None, "eos_token_id": 2}),
        ("generation_config.json", {"temperature": 1.0, "do_sample": True, "eos_token_id": [2, 1]}),
        ("tokenizer.json", {"padding": {"strategy": "BatchLongest"}}),
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("tokenizer_config.json", {"model_max_length": 10, "added_tokens_decoder": {"2": {"content": "<e>"}}}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<e>"}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}),
    ],
)
def test_what_changes_nothing_is_not_compared(model: Path, file: str, fields: dict[str, object]) -> None:
    before = model_function(model)
    change(model, file, **fields)
    assert model_function(model) == before


def test_the_same_model_in_the_form_of_a_newer_library(model: Path) -> None:
    before = model_function(model)
    rest = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    (model / "config.json").write_text(json.dumps({**rest, "rope_parameters": rope}))
    change(model, "tokenizer_config.json", chat_template=None)
    (model / "chat_template.jinja").write_text("{{ messages }}\n")
    assert model_function(model) == before


async def test_a_field_that_is_left_to_its_default_may_be_written_out(model: Path, tmp_path: Path) -> None:
    await save_as(model, tmp_path / "saved")
    defaults = {"hidden_act": "silu", "sliding_window": None, "layer_types": ["full_attention"] * 32}
    change(model, "config.json", **defaults)
    assert await resumed(model, tmp_path / "saved") == ""
    change(model, "config.json", **{**defaults, "hidden_act": "gelu"})
    assert 'hidden_act was absent and is "gelu"' in await resumed(model, tmp_path / "saved")


async def test_rope_scaling_without_rope_theta_leaves_it_to_its_default(model: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}
    (model / "config.json").write_text(json.dumps(config))
    await save_as(model, tmp_path / "saved")
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    assert await resumed(model, tmp_path / "saved") == ""
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    assert "rope_theta was absent and is 500.0" in await resumed(model, tmp_path / "saved")


async def test_null_is_no_default(model: Path, tmp_path: Path) -> None:
    """Gemma 2's logits are capped at 30 unless its config says null."""
    config = {"model_type": "gemma2", "hidden_size": 8, "final_logit_softcapping": 30.0}
    (model / "config.json").write_text(json.dumps(config))
    await save_as(model, tmp_path / "saved")
    (model / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": None}))
    assert "final_logit_softcapping was 30.0 and is null" in await resumed(model, tmp_path / "saved")
    await save_as(model, tmp_path / "without")
    (model / "config.json").write_text(json.dumps({"model_type": "gemma2", "hidden_size": 8}))
    assert "final_logit_softcapping was null and is absent" in await resumed(model, tmp_path / "without")


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("special_tokens_map.json", '{"eos_token": "a"}', "tokenizer"),
        ("added_tokens.json", '{"<t>": 9}', "tokenizer"),
        ("additional_chat_templates/tool_use.jinja", "{{ tools }}", "chat_template"),
    ],
)
def test_further_files_of_a_tokenizer_count(model: Path, file: str, content: str, name: str) -> None:
    before = model_function(model)
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text(content)
    after = model_function(model)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == {name}


async def test_changes_that_are_accepted_reach_the_rollout_side_for_its_ledger(model: Path, tmp_path: Path) -> None:
    side, rollout = Side(), Rollout()
    await save_as(model, tmp_path / "saved")
    change(model, "config.json", rope_theta=500.0)
    flags = CheckpointArguments(load=tmp_path / "saved", load_anyway=("rope_theta",))
    identity = RunIdentity(run="mine", model=fingerprint(ModelArguments(hf_checkpoint=model)), ranks={})
    await RunCheckpoints(side, rollout, flags, identity).load()  # type: ignore[arg-type]
    assert rollout.accepted == ("rope_theta was 10000.0 and is 500.0",)


async def test_a_critic_of_its_own_is_compared(model: Path, tmp_path: Path) -> None:
    critic = tmp_path / "critic"
    shutil.copytree(model, critic)
    await save_as(model, tmp_path / "saved", critic)
    assert await resumed(model, tmp_path / "saved", critic=critic) == ""
    change(critic, "config.json", rope_theta=500.0)
    assert "critic.rope_theta was 10000.0 and is 500.0" in await resumed(model, tmp_path / "saved", critic=critic)
    assert await resumed(model, tmp_path / "saved", "critic.rope_theta", critic=critic) == ""


def test_merges_in_the_form_of_a_newer_library(model: Path) -> None:
    change(model, "tokenizer.json", model={"vocab": {"a": 0, "b": 1}, "merges": ["a b"]})
    before = model_function(model)
    newer = {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "ignore_merges": False, "dropout": None}
    change(model, "tokenizer.json", model=newer)
    assert model_function(model) == before
    change(model, "tokenizer.json", model={**newer, "merges": [["b", "a"]]})
    assert model_function(model) != before


@pytest.mark.parametrize("part", ["pre_tokenizer", "post_processor", "decoder"])
def test_offsets_of_tokens_in_a_text_are_not_compared(model: Path, part: str) -> None:
    whole = json.loads((model / "tokenizer.json").read_text())

    def fingerprint(**fields: object) -> object:
        step = {"type": "ByteLevel", "add_prefix_space": False, **fields}
        steps = {"pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"}[part]
        (model / "tokenizer.json").write_text(json.dumps({**whole, part: {"type": "Sequence", steps: [step]}}))
        return model_function(model)["tokenizer"]

    before = fingerprint(trim_offsets=False)
    assert fingerprint(trim_offsets=True) == before  # as transformers 5 saves Qwen2's
    assert fingerprint(trim_offsets=False, use_regex=True) != before


def test_an_image_processor_in_the_file_of_all_processors_is_the_one_that_is_read(model: Path) -> None:
    before = model_function(model)
    (model / "processor_config.json").write_text(json.dumps({"image_processor": IMAGES}))
    assert model_function(model) == before
    (model / "processor_config.json").write_text(json.dumps({"image_processor": {**IMAGES, "patch_size": 16}}))
    assert model_function(model)["images.patch_size"] == 16


def test_a_vocabulary_of_another_form_counts(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tiktoken.model").write_bytes(b"YQ== 0")
    before = model_function(model)["tokenizer"]
    (model / "tiktoken.model").write_bytes(b"YQ== 1")
    assert model_function(model)["tokenizer"] != before
    shutil.rmtree(model)
    assert "tokenizer" in model_function(model)  # of nothing: --hf-checkpoint is checked elsewhere
