"""Presets of models: each can split the models that it is for, and says what it was compared with.

``tests/integration/test_recipes_fit.py`` counts their memory.
"""

from __future__ import annotations

import json
import re
from itertools import batched
from pathlib import Path

import pytest

from miles_async.arguments.argument_files import presets
from miles_async.arguments.cluster_checks import check_colocation, check_engine_sizes, check_network
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import flag_problems
from miles_async.backends.megatron.families.hf_config import check_model, read_config
from miles_async.backends.megatron.families.layout import check_layout
from miles_async.train_data.work import model_work
from miles_async.weights.transports.choice import count_senders, transport_problems

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests/recipes/configs"
KIMI = ROOT / "examples/one_trillion/config.json"

MODELS: dict[str, tuple[tuple[str, ...], int]] = {
    "deepseek-v3": (("DeepSeek-R1",), 128),
    "deepseek-v3.2": (("DeepSeek-V3.2",), 128),
    "gemma-4-26b-a4b": (("gemma-4-26B-A4B-it",), 16),
    "gemma-4-31b": (("gemma-4-31B-it",), 16),
    "glm-4.5": (("GLM-4.5", "GLM-4.7-355B-A32B"), 64),
    "glm-4.7-flash": (("GLM-4.7-Flash",), 16),
    "glm-5": (("GLM-5",), 128),
    "gpt-oss-120b": (("gpt-oss-120b",), 32),
    "gpt-oss-20b": (("gpt-oss-20b",), 8),
    "kimi-k2": (("Kimi-K2",), 512),
    "llama-3.1-8b": (("Llama-3.1-8B-Instruct",), 4),
    "minimax-m2": (("MiniMax-M2",), 64),
    "nemotron-3-nano-30b-a3b": (("Nemotron-3-Nano-30B-A3B",), 16),
    "qwen2.5-vl-7b": (("Qwen2.5-VL-7B-Instruct",), 4),
    "qwen3-235b-a22b": (("Qwen3-235B-A22B",), 64),
    "qwen3-30b-a3b": (("Qwen3-30B-A3B",), 16),
    "qwen3-30b-a3b-offload": (("Qwen3-30B-A3B",), 8),
    "qwen3-32b": (("Qwen3-32B",), 16),
    "qwen3-4b": (("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"), 2),
    "qwen3-8b": (("Qwen3-8B", "Qwen3-14B"), 4),
    "qwen3-next-80b-a3b": (("Qwen3-Next-80B-A3B",), 32),
    "qwen3-vl-30b-a3b": (("Qwen3-VL-30B-A3B-Instruct",), 16),
    "qwen3-vl-8b": (("Qwen3-VL-8B-Instruct",), 4),
    "qwen3.5-27b": (("Qwen3.5-27B",), 16),
    "qwen3.5-35b-a3b": (("Qwen3.5-35B-A3B",), 16),
    "qwen3.5-9b": (("Qwen3.5-4B", "Qwen3.5-9B"), 4),
}
"""Preset → names of models, and how many GPUs hold one in training."""

CASES = [(preset, model) for preset, (models, _) in MODELS.items() for model in models]


def config_of(model: str) -> Path:
    """Its config.json, by the figures of transformers and of slime's and miles' scripts."""
    return KIMI if model == "Kimi-K2" else CONFIGS / f"{model}.json"


def test_every_preset_is_checked() -> None:
    assert {name for name, file in presets().items() if file.parent.name == "models"} == set(MODELS)


def test_what_sglang_decides_is_known_of_every_preset() -> None:
    """``make test-gpu-contract``, which runs at night, compares the rows."""
    rows = [line.split("\t") for line in (ROOT / "docs/sglang_choices.tsv").read_text().splitlines()]
    assert [row[0].partition(",")[0] for row in rows] == ["preset", *sorted(MODELS)]
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_a_preset_splits_the_models_that_it_is_for(preset: str, model: str, tmp_path: Path) -> None:
    # covers: P8
    (tmp_path / "config.json").write_bytes(config_of(model).read_bytes())
    config = read_config(tmp_path)
    check_model(config, tmp_path)
    check_layout(config, parse_arguments([f"@preset:{preset}"], prog="test").arguments.model, MODELS[preset][1])


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_engines_of_a_node_or_more_keep_experts_whole(preset: str, model: str) -> None:
    """As slime's recipes: splitting each expert over 8 GPUs and more leaves products of a few dozen columns."""
    arguments = parse_arguments([f"@preset:{preset}"], prog="test").arguments
    config = json.loads(config_of(model).read_text())
    experts = next(
        (config[name] for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in config), 0
    )
    gpus = arguments.cluster.rollout_num_gpus_per_engine
    whole = bool(experts) and gpus >= 8 and preset != "qwen3-30b-a3b-offload"  # slime's recipe has none for that
    assert arguments.engines.sglang_extra[:2] == (("--ep-size", str(gpus)) if whole else ())
    assert not whole or experts % gpus == 0


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_engines_of_several_nodes_split_attention_as_slimes_recipes_do(preset: str, model: str) -> None:
    """Over 8 GPUs, Kimi-K2's over two, GLM-5's not at all. Each group prefills 2,048 tokens at a time or more."""
    arguments = parse_arguments([f"@preset:{preset}"], prog="test").arguments
    gpus, rest = arguments.cluster.rollout_num_gpus_per_engine, arguments.engines.sglang_extra[2:]
    groups = gpus // {"kimi-k2": 2, "glm-5": 1}.get(preset, 8)
    if groups < 2:
        assert rest == ()
        return
    settings = dict(batched((word for word in rest if word != "--enable-dp-lm-head"), 2))
    assert {"--attn-dp-size": str(groups), "--moe-dense-tp-size": "1"}.items() <= settings.items()
    assert settings["--mem-fraction-static"] == "0.7"  # SGLang lowers it with the number of groups
    assert "--enable-dp-lm-head" in rest
    assert int(settings.get("--chunked-prefill-size", 8192)) // groups >= 2048


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_a_publication_has_time(preset: str, model: str) -> None:
    """At 0.4 GB/s from each sending rank: a fifth of what files in memory take (docs/benchmarks.md, publication)."""
    arguments = parse_arguments([f"@preset:{preset}"], prog="test").arguments
    config = json.loads(config_of(model).read_text())
    work = model_work({"intermediate_size": 1, **config, **config.get("text_config", {})})
    assert work is not None
    senders = count_senders(arguments.weights, arguments.model.pipeline_model_parallel_size)
    assert 2 * work.weights / senders / arguments.weights.publication_timeout < 0.4e9


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_a_preset_is_a_run_without_more_than_data_and_gpus(preset: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config_of(model).read_bytes())
    gpus = MODELS[preset][1]
    engine = parse_arguments([f"@preset:{preset}"], prog="test").arguments.cluster.rollout_num_gpus_per_engine
    nodes = max(1, gpus // 8)
    words = (
        f"@preset:{preset} --hf-checkpoint {tmp_path} --prompt-data prompts.jsonl --num-rollout 5 --rm-type math "
        f"--use-rollout-logprobs --actor-num-nodes {nodes} --actor-num-gpus-per-node {gpus // nodes} "
        f"--rollout-num-gpus {engine} --ray-address 10.0.0.1:6379 --device cuda"
    )
    assert flag_problems(parse_arguments(words.split(), prog="test").arguments) == []


@pytest.mark.parametrize("preset", [each for each, file in presets().items() if file.parent.name == "cluster"])
def test_a_first_start_on_gpus_has_time_to_compile_kernels(preset: str) -> None:
    arguments = parse_arguments([f"@preset:{preset}"], prog="test").arguments
    found = {arguments.engines.engine_start_timeout, arguments.cluster.trainer_start_timeout}
    assert (found == {1800}) is (preset != "cpu")


def test_a_node_whose_gpus_take_turns_trains_a_mixture_of_30b(tmp_path: Path) -> None:
    """As slime's recipe: nothing of the two presets contradicts the other."""
    (tmp_path / "config.json").write_bytes(config_of("Qwen3-30B-A3B").read_bytes())
    words = ["@preset:1x8-colocate", "@preset:qwen3-30b-a3b-offload", "--hf-checkpoint", str(tmp_path)]
    arguments = parse_arguments(words, prog="test").arguments
    assert not list(check_colocation(arguments))
    assert not list(transport_problems(arguments.weights, "cuda", external_engines=False))
    assert (
        arguments.cluster.trainer_world_size == arguments.cluster.rollout_num_gpus == MODELS["qwen3-30b-a3b-offload"][1]
    )


@pytest.mark.parametrize("engine", [(), ("--rollout-num-gpus-per-engine", "16", "--rollout-num-nodes-per-engine", "2")])
def test_nodes_whose_gpus_take_turns_need_another_transport_only(engine: tuple[str, ...]) -> None:
    """The line of docs/engines.md."""
    words = ["--ray-address", "auto", "--actor-num-nodes", "2", "--rollout-num-gpus", "16", *engine]
    taking_turns = ["@preset:1x8-colocate", *words, "--weight-transport"]
    arguments = parse_arguments([*taking_turns, "object_store"], prog="test").arguments
    assert [*check_colocation(arguments), *check_network(arguments), *check_engine_sizes(arguments)] == []
    assert not list(transport_problems(arguments.weights, "cuda", external_engines=False, several_nodes=bool(engine)))
    [problem] = check_colocation(parse_arguments([*taking_turns, "ipc"], prog="test").arguments)
    assert "use object_store" in problem


@pytest.mark.parametrize("preset", MODELS)
def test_a_preset_tells_its_size_and_what_it_was_compared_with(preset: str) -> None:
    size, compared = presets()[preset].read_text().splitlines()[:2]
    count = {2: "two", 4: "four"}.get(MODELS[preset][1], MODELS[preset][1])
    assert re.search(rf": {count} GPUs (of 141 GB )?hold it in training, \w+ generates?\. Give --hf-checkpoint", size)
    assert re.match(
        r"# Compared with ((slime|miles), (scripts|examples/\w+)/run[-_].+\.(sh|py)|that of gpt-oss-20b: )", compared
    )
