"""What keeps a model from being trained or served, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_async.arguments import Arguments
from miles_async.arguments.algorithm_checks import check_critic
from miles_async.arguments.parser import parse_arguments
from miles_async.backends.megatron.families.known import FAMILIES
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import check_hooks, model_problems
from tests.unit.arguments.test_model_presets import CASES, MODELS, config_of

GLM5 = {
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "n_routed_experts": 4,
    "kv_lora_rank": 16,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}


def problems(*words: object) -> list[str]:
    return list(model_problems(parse_arguments([str(word) for word in words]).arguments))


def model(directory: Path, config: dict[str, object]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_a_family_that_engines_serve_on_gpus_only_is_refused_on_a_cpu(
    device: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: M21
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: 8)
    refusal = (
        "--device cpu: engines cannot serve model_type 'glm_moe_dsa': SGLang 0.5.23 chooses the tokens of sparse "
        "attention with kernels for GPUs only; use --device cuda"
    )
    assert problems("--hf-checkpoint", model(tmp_path, GLM5), "--device", device) == [refusal] * refused


TEXT = {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = {
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {},
}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), None),
        (("--environment-path", "m:Environment"), None),
        (("--agent-path", "m:agent"), None),
        (("--loss-type", "sft_loss"), None),
        (("--use-opd",), "--use-opd"),
        (("--save-debug-rollout-data", "dumps/{rollout_id}.parquet"), "--save-debug-rollout-data"),
        (("--load-debug-rollout-data", "dumps/{rollout_id}.parquet"), "--load-debug-rollout-data"),
    ],
)
def test_images_are_refused_where_they_would_be_lost(flags: tuple[str, ...], named: str | None, tmp_path: Path) -> None:
    found = problems("--hf-checkpoint", model(tmp_path, IMAGES), "--device", "cpu", *flags)
    if named is None:
        assert found == []
        return
    assert found == [f"{named}: images don't pass through it, and model_type 'qwen2_5_vl' reads images; leave it out"]


@pytest.mark.parametrize(("config", "refused"), [(IMAGES, True), (TEXT, False)])
def test_a_critic_of_a_model_that_reads_images_is_refused(
    config: dict[str, object], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_values.py"
    module.write_text("def make(arguments): return own\ndef own(batch): ...\nown.needs = ('values',)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for advantages, check in (("gae", check_critic), ("own_values:make", _hook_problems)):
        words = ("--hf-checkpoint", model(tmp_path / "model", config), "--token-advantages", advantages)
        others = ("--advantage-estimator", "reinforce", "--rm-type", "math")
        found = list(check(parse_arguments([*map(str, words), *others]).arguments))
        assert [f"--token-advantages {advantages}: its critic reads no images" in each for each in found] == (
            [True] * refused
        )


def _hook_problems(arguments: Arguments) -> list[str]:
    try:
        check_hooks(arguments)
    except ConfigurationError as error:
        return [str(error)]
    return []


def test_a_reference_model_reads_images_if_the_policy_does(tmp_path: Path) -> None:
    policy, other = model(tmp_path / "images", IMAGES), model(tmp_path / "text", TEXT)
    assert problems("--hf-checkpoint", policy, "--ref-hf-checkpoint", policy) == []
    (problem,) = problems("--hf-checkpoint", policy, "--ref-hf-checkpoint", other)
    assert "should both read images, or neither" in problem


PLAIN = TEXT | {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 8}
VOCABULARY = {"a": 0, "b": 1}
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("role", ["ref", "critic"])
@pytest.mark.parametrize(
    ("config", "vocabulary", "flags", "message"),
    [
        ({}, VOCABULARY, (), None),
        ({"num_hidden_layers": 6}, VOCABULARY, (), "num_hidden_layers 6"),
        ({"num_attention_heads": 3}, VOCABULARY, ("--tensor-model-parallel-size", "2"), "num_attention_heads 3"),
        ({}, {"a": 1, "b": 0}, (), "it reads the policy's token ids, and expected id 0 for 'a'"),
        ({}, None, (), None),  # nothing to compare
    ],
)
def test_reference_and_critic_run_in_the_policys_place(
    role: str,
    config: dict[str, object],
    vocabulary: dict[str, int] | None,
    flags: tuple[str, ...],
    message: str | None,
    tmp_path: Path,
) -> None:
    for name, differs, tokens in (("policy", {}, VOCABULARY), ("other", config, vocabulary)):
        directory = model(tmp_path / name, PLAIN | differs)
        if tokens is not None:
            (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    split = ("--pipeline-model-parallel-size", "4", "--actor-num-gpus-per-node", "8")
    words = ("--hf-checkpoint", tmp_path / "policy", f"--{role}-hf-checkpoint", tmp_path / "other")
    found = problems(*words, *split, *flags)
    if message is None:
        assert found == []
    else:
        (problem,) = found
        assert problem.startswith(f"--{role}-hf-checkpoint")
        assert message in problem


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-hf-checkpoint", "--critic-hf-checkpoint"])
def test_float8_files_without_scales_are_refused_wherever_they_are_read(flag: str, tmp_path: Path) -> None:
    whole, bare = (model(tmp_path / name, PLAIN | {"quantization_config": FLOAT8}) for name in ("whole", "bare"))
    save_file({"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, bare / "model.safetensors")
    words = {"--hf-checkpoint": whole} | {flag: bare}
    found = problems("--device", "cpu", *(word for pair in words.items() for word in pair))
    assert found == [
        f"{bare}: a.weight is F8_E4M3, and expected its scales in a.weight_scale_inv: its values would be read "
        "wrongly; use another checkpoint"
    ]


def test_a_reference_that_follows_has_the_policys_shape(tmp_path: Path) -> None:
    policy, other = model(tmp_path / "policy", PLAIN), model(tmp_path / "other", PLAIN | {"num_hidden_layers": 2})
    words = ("--hf-checkpoint", policy, "--ref-hf-checkpoint", other)
    assert problems(*words) == []
    (problem,) = problems(*words, "--ref-update-interval", 5)
    assert problem.startswith("--ref-update-interval")
    assert problem.endswith("differs from it in num_hidden_layers")


QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), []),
        (("--rollout-num-gpus-per-engine", "4"), ["moe_intermediate_size of config.json leaves 192"]),
        (("--rollout-num-gpus-per-engine", "4", "--sglang-ep-size", "4"), []),
        (("--rollout-num-gpus-per-engine", "4", "--sglang-expert-parallel-size=4"), []),
        (("--rollout-num-gpus-per-engine", "4", "--sglang-moe-a2a-backend", "deepep"), []),
        (("--rollout-num-gpus-per-engine", "8", "--sglang-ep-size", "8"), ["num_attention_heads × head_dim"]),
        (
            ("--rollout-num-gpus-per-engine", "8", "--sglang-ep-size=8", "--sglang-enable-dp-attention",
             "--sglang-dp-size", "2"),
            [],
        ),
        (("--sglang-quantization", "fp8"), ["--sglang-quantization: engines would quantize once more"]),
        (("--sglang-speculative-algorithm", "EAGLE"), ["--sglang-speculative-algorithm: draft models"]),
        (("--sglang-speculative-algorithm", "NGRAM"), []),
        (("--sglang-json-model-override-args", "{}"), ["--sglang-json-model-override-args: it is how engines"]),
        (("--sglang-moe-dense-tp-size", "x", "--sglang-ep-size", "0"), []),  # SGLang will refuse them
        (("--rollout-num-gpus-per-engine", "4", "--debug-rollout-only"), []),
        (("--rollout-num-gpus-per-engine", "4", "--debug-train-only"), []),
        (("--rollout-num-gpus-per-engine", "4", "--loss-type", "sft_loss"), []),
    ],
)  # fmt: skip
def test_a_model_whose_blocks_engines_cannot_hold_is_refused(
    words: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    found = problems(
        "--hf-checkpoint", model(tmp_path, QWEN3_MOE), "--rollout-num-gpus", 8, "--device", "cpu", "--bf16",
        "--rollout-quantization", "fp8", *words,
    )  # fmt: skip
    assert len(found) == len(expected)
    for text, problem in zip(expected, found, strict=True):
        assert problem.startswith("--rollout-quantization fp8: ")
        assert text in problem


WHOLE_EXPERTS = {
    **dict.fromkeys(("deepseek-v3", "glm-4.5", "kimi-k2"), ("--sglang-moe-a2a-backend", "deepep")),
    "qwen3-30b-a3b-offload": ("--sglang-ep-size", "8"),
}
"""Flags without which parts of experts would be smaller than a block."""


@pytest.mark.parametrize(("preset", "name"), CASES)
def test_float8_fits_every_preset_of_a_family_that_was_compared_in_it(
    preset: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: 64)
    config = json.loads(config_of(name).read_text())
    given = (
        f"@preset:{preset}", "--hf-checkpoint", model(tmp_path, config), "--device", "cuda", "--ray-address", "auto",
        "--rollout-num-gpus", "64", "--actor-num-gpus-per-node", MODELS[preset][1], "--rollout-quantization", "fp8",
    )  # fmt: skip
    found = problems(*given)
    if words := WHOLE_EXPERTS.get(preset):
        assert len(found) == 1
        assert "moe_intermediate_size of config.json leaves" in found[0]
        found = problems(*given, *words)
    kind = config["model_type"]
    refusal = f"--rollout-quantization fp8: model_type {kind!r} was not compared in it"
    assert [problem.partition(";")[0] for problem in found] == ([] if FAMILIES[kind].float8 else [refusal])


SPLIT = {"experts": "moe_intermediate_size of", "shared": "n_shared_experts ×", "dense": "intermediate_size of"}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), ["experts", "shared", "dense"]),
        (("--sglang-ep=4",), ["shared", "dense"]),
        (("--sglang-ep-size=4", "--sglang-moe-dense-tp-size=1"), ["shared"]),
        (("--sglang-moe-a2a-backend=deepep",), ["dense"]),
    ],
)
def test_flags_of_sglang_that_keep_a_part_of_the_model_whole(
    words: tuple[str, ...], kept: list[str], tmp_path: Path
) -> None:
    parts = {"n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 384}
    found = problems(
        "--hf-checkpoint", model(tmp_path, QWEN3_MOE | parts), "--device", "cpu", "--rollout-quantization", "fp8",
        "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 4, *words,
    )  # fmt: skip
    assert len(found) == len(kept)
    for part, problem in zip(kept, found, strict=True):
        assert problem.startswith(f"--rollout-quantization fp8: {SPLIT[part]}")


def test_engines_that_get_no_weights_or_run_already_may_split_blocks(tmp_path: Path) -> None:
    directory = model(tmp_path, QWEN3_MOE)
    groups = tmp_path / "groups.toml"
    words = (
        "--hf-checkpoint",
        directory,
        "--device",
        "cpu",
        "--rollout-quantization",
        "fp8",
        "--server-groups",
        groups,
    )
    for group, refused in (
        ("gpus_per_engine = 4", True),
        ('role = "evaluation"\ngpus_per_engine = 4', True),
        ('role = "frozen"\ngpus_per_engine = 4', False),
        ('gpus_per_engine = 4\nexternal = ["a:1"]', False),
    ):
        groups.write_text(f"[groups.train]\n\n[groups.other]\n{group}\n")
        assert len(problems(*words)) == refused, group


@pytest.mark.parametrize("where", ["", "text_config"])
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--sglang-speculative-algorithm", "EAGLE"), "--sglang-speculative-algorithm: draft models"),
        (("--sglang-speculative-algorithm", "NGRAM"), None),
        (("--sglang-json-model-override-args", "{}"), "--sglang-json-model-override-args: it is how engines are told"),
        (("--sglang-quantization", "fp8"), None),
        (
            ("--sglang-speculative-algorithm", "EAGLE", "--debug-rollout-only"),
            None,
        ),  # engines read the files themselves
    ],
)
def test_engines_of_float8_files_have_to_expect_floats(
    words: tuple[str, ...], refused: str | None, where: str, tmp_path: Path
) -> None:
    quantization = {"quantization_config": FLOAT8}
    directory = model(tmp_path, QWEN3_MOE | ({where: quantization} if where else quantization))
    found = problems("--hf-checkpoint", directory, "--device", "cpu", *words)
    assert len(found) == (refused is not None)
    if refused is not None:
        assert found[0].startswith(f"--hf-checkpoint in float8, whose weights are published as floats: {refused}")
    assert problems("--hf-checkpoint", model(tmp_path / "b", QWEN3_MOE), "--device", "cpu", *words) == []


def test_quantized_weights_want_bf16_on_gpus_and_a_family_that_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: 8)
    words = ("--hf-checkpoint", model(tmp_path / "a", QWEN3_MOE), "--rollout-quantization", "fp8", "--device", "cuda")
    assert problems(*words, "--bf16") == []
    assert problems(*words, "--no-bf16") == [
        "--rollout-quantization fp8: GPUs quantize activations of bf16 only; add --bf16"
    ]
    [found] = problems("--hf-checkpoint", model(tmp_path / "b", QWEN3_MOE | {"model_type": "llama"}), *words[2:])
    assert found.startswith("--rollout-quantization fp8: model_type 'llama' was not compared in it; leave it out, or ")
