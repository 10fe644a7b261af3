"""Tables and refusals of ``plan --memory``; what ranks take is given, not measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.live import with_flags
from miles_async.arguments.parser import assemble
from miles_async.backends.megatron.memory.stages import StageMemory, StageRequest
from miles_async.runs import memory

GIB = 1 << 30
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
# 1 GiB of bf16 weights, 2 of gradients, 6 of optimizer, 3 of activations.
STAGES = [StageMemory(stages=range(1), parameters=GIB // 2, expert_parameters=0, kept=GIB, peak=3 * GIB, under_way=1)]
RECOMPUTED = [replace(STAGES[0], kept=GIB // 4, peak=2 * GIB)]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(memory, "measure", lambda request: {None: STAGES, "full": RECOMPUTED})
    cluster = {"device": "cpu", "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4, "gpu_memory_gb": 80}
    return assemble({**cluster, "hf_checkpoint": tmp_path, "bf16": True, "rollout_max_response_len": 1024}, {})


def write_config(arguments: Arguments, config: Mapping[str, object]) -> None:
    (arguments.model.directory / "config.json").write_text(json.dumps(config))


def report(arguments: Arguments, **flags: FlagValue) -> str:
    """That of a run with these flags, by field, changed."""
    return memory.memory_report(with_flags(arguments, flags))


def trainer_cells(arguments: Arguments, **flags: FlagValue) -> list[str]:
    """Weights, gradients, optimizer, reference, critic, activations, staging, sum, host copy, kept weights."""
    line = next(line for line in report(arguments, **flags).splitlines() if line.startswith("│ 0 "))
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_tables(arguments: Arguments) -> None:
    assert " ".join(trainer_cells(arguments)) == "1.0 2.0 6.0 0.0 0.0 3.0 1.0 13.0 0.0 0.0"
    # 2 KV heads on 4 ranks: each has one of them; (0.85 × 80 − 0.25) GiB for 4 layers × 2 × 64 × 2 bytes.
    assert engine_cells(arguments) == ["4", "0.2", "1,024", f"{int(67.75 * 1024**2):,}"]


def activation_cells(arguments: Arguments) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of activations."""
    lines = memory.memory_report(arguments).splitlines()
    start = next(index for index, line in enumerate(lines) if "Activations by" in line)
    end = next(index for index, line in enumerate(lines[start:], start) if line.startswith("└"))
    cells = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines[start:end] if line[0] in "┃│"]
    return cells[0], cells[1:]


def test_activations_are_told_for_every_recomputation(arguments: Arguments) -> None:
    """Megatron refused one of them. The logits are those of 1,024 tokens in fp32, 128 Ki of them per token and rank."""
    write_config(arguments, CONFIG | {"vocab_size": 1 << 18})
    split = with_flags(arguments, {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2})
    header, rows = activation_cells(split)
    assert header == ["stage", "none (chosen)", "selective", "full", "of which logits of 1024 tokens"]
    assert rows == [["0", "3.0", "refused", "2.0", "0.5"]]
    full = with_flags(split, {"recompute_granularity": "full"})
    assert activation_cells(full)[0][1:4] == ["none", "selective", "full (chosen)"]
    assert trainer_cells(full)[5] == "2.0"


def test_the_last_stage_alone_has_logits(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(arguments, CONFIG | {"vocab_size": 1 << 18})
    stages = [replace(STAGES[0], stages=range(1), under_way=2), replace(STAGES[0], stages=range(1, 2))]
    monkeypatch.setattr(memory, "measure", lambda request: {None: stages})
    split = with_flags(arguments, {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2})
    assert [(row[0], row[1], row[4]) for row in activation_cells(split)[1]] == [
        ("0 (fullest)", "4.0", "0.0"),
        ("1", "3.0", "1.0"),
    ]


@pytest.mark.parametrize(("meanwhile", "host"), [(True, "7.0"), (False, "0.0")])  # of bf16 weights 14 bytes each
def test_saves_meanwhile_take_host_memory(arguments: Arguments, meanwhile: bool, host: str) -> None:
    cells = trainer_cells(arguments, save=Path("checkpoints"), async_save=meanwhile)
    assert cells[-3:] == ["13.0", host, "0.0"]


def test_kept_versions_take_host_memory(arguments: Arguments) -> None:
    """1 GiB for each of three versions that a token may have, and for one that is about to be kept."""
    cells = trainer_cells(arguments, prox_logp_method="snapshots", use_tis=True, max_weight_staleness=2)
    assert cells[-3:] == ["13.0", "0.0", "4.0"]


def test_room_for_tokens_is_not_guessed(arguments: Arguments) -> None:
    assert "with --gpu-memory-gb" in report(arguments, gpu_memory_gb=None)


def engine_cells(arguments: Arguments, *flags: str) -> list[str]:
    """GPUs, GiB of weights, bytes per token and tokens of an engine with these flags of SGLang."""
    given = replace(arguments, engines=EnginesArguments(sglang_extra=flags))
    line = next(line for line in memory.memory_report(given).splitlines() if "│ engine" in line)
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_a_fraction_that_is_given_wins(arguments: Arguments) -> None:
    assert engine_cells(arguments, "--mem-fraction-static=0.5")[-1] == f"{int(39.75 * 1024**2):,}"


@pytest.mark.parametrize(
    ("dtype", "per_token"), [("auto", 1024), ("bfloat16", 1024), ("fp8_e4m3", 512), ("fp8_e5m2", 512)]
)
def test_a_cache_in_half_the_bits_has_room_for_twice_the_tokens(
    arguments: Arguments, dtype: str, per_token: int
) -> None:
    tokens = int(67.75 * 1024**3) // per_token
    found = engine_cells(arguments, f"--kv-cache-dtype={dtype}")
    assert found == ["4", "0.2", f"{per_token:,}", f"{tokens:,}"]


def test_a_cache_of_unknown_form_is_not_guessed(arguments: Arguments) -> None:
    assert engine_cells(arguments, "--kv-cache-dtype", "nvfp4") == ["4", "0.2", "unknown", "unknown"]


@pytest.mark.parametrize(("flags", "ratio"), [((), 0.9), (("--mamba-full-memory-ratio", "0.25"), 0.25)])
def test_states_of_linear_attention_take_their_share_of_the_cache(
    arguments: Arguments, flags: tuple[str, ...], ratio: float
) -> None:
    hybrid = CONFIG | {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
    hybrid |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    hybrid |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    write_config(arguments, hybrid)
    cells = engine_cells(arguments, *flags)
    assert cells[2] == "256"  # one layer in four has keys and values
    assert int(cells[3].replace(",", "")) == pytest.approx(67.75 * GIB / 256 / (1 + ratio), abs=1)


WHOLE = CONFIG | {"intermediate_size": 2048, "vocab_size": 11264}


@pytest.mark.parametrize(
    "flags", [("--enable-dp-attention", "--dp-size=4"), ("--attn-dp-size", "4"), ("--attn-dp-size=4",)]
)
def test_ranks_of_data_parallel_attention_hold_all_heads(arguments: Arguments, flags: tuple[str, ...]) -> None:
    """Each of 4 ranks: both KV heads of its share of the requests, and all of attention and embedding."""
    write_config(arguments, WHOLE)
    copied = 4 * 2 * 512 * (512 + 128) + 11264 * 512  # weights that each rank has, of which it else has a quarter
    weights = (GIB // 2 - copied) * 2 // 4 + copied * 2
    room = int((0.85 * 80 * GIB - weights) // 2048)  # 4 layers × 2 × 2 heads × 64 × 2 bytes
    assert engine_cells(arguments, *flags) == ["4", "0.3", "2,048", f"4 × {room:,}"]


def test_half_of_the_ranks_share_each_cache(arguments: Arguments) -> None:
    """Two of four ranks have a KV head each. Without sizes in config.json no weights are counted twice."""
    room = int(67.75 * 1024**2)
    assert engine_cells(arguments, "--attn-dp-size=2") == ["4", "0.2", "1,024", f"2 × {room:,}"]


def test_ranks_that_do_not_fit_are_refused(arguments: Arguments) -> None:
    report(arguments, gpu_memory_gb=13.0)
    with pytest.raises(memory.ConfigurationError, match=r"stage 0 needs 13\.0 GiB and --gpu-memory-gb is 12\.9"):
        report(arguments, gpu_memory_gb=12.9)


def test_hosts_need_room_for_what_is_published_and_links_a_least_speed(arguments: Arguments) -> None:
    lines = report(arguments, publication_timeout=100.0).splitlines()
    (line,) = (line for line in lines if line.startswith("Publication: "))
    assert "1.0 GiB from each of 1 sending ranks" in line
    assert "up to 3.0 GiB of files for 3 versions" in line
    assert line.endswith("--publication-timeout 100 s: 0.011 GB/s per rank at least.")


def test_a_version_and_engines_in_float8_take_about_half(arguments: Arguments) -> None:
    """Embedding and output layer, 11,264 × 512 elements each, stay in bf16."""
    write_config(arguments, WHOLE)
    quantized = replace(arguments, weights=replace(arguments.weights, rollout_quantization="fp8"))
    (line,) = (line for line in memory.memory_report(quantized).splitlines() if line.startswith("Publication: "))
    assert "0.5 GiB from each of 1 sending ranks" in line
    weights = 2 * 2 * 11264 * 512 + (GIB // 2 - 2 * 11264 * 512) * (1 + 4 / 128**2)
    assert engine_cells(quantized)[1] == "0.1"
    tokens = int(engine_cells(quantized)[-1].replace(",", ""))
    assert tokens == pytest.approx((0.85 * 80 * GIB - weights / 4) / 1024, abs=1)


def test_engines_that_share_a_gpu_have_less_of_it(arguments: Arguments) -> None:
    shared = with_flags(arguments, {"colocate": True})
    own, part = (int(engine_cells(each)[-1].replace(",", "")) for each in (arguments, shared))
    assert part < own


def test_engines_without_room_for_a_sample_are_refused(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    small = StageMemory(stages=range(1), parameters=1000, expert_parameters=0, kept=0, peak=0, under_way=1)
    monkeypatch.setattr(memory, "measure", lambda request: {None: [small]})
    tight = with_flags(arguments, {"update_weight_buffer_size": 1})
    report(tight, gpu_memory_gb=0.0013)  # 1,000 KiB of cache for 1,025 tokens are too little, 1,100 enough
    with pytest.raises(memory.ConfigurationError, match="a sample may have 1025: give it more GPUs"):
        report(tight, gpu_memory_gb=0.0011)


def test_the_loss_decides_what_else_is_kept(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StageRequest] = []

    def measure(request: StageRequest) -> dict[None, list[StageMemory]]:
        asked.append(request)
        return {None: STAGES}

    monkeypatch.setattr(memory, "measure", measure)
    compared = with_flags(arguments, {"use_kl_loss": True, "kl_loss_coef": 0.1, "log_entropy": True})
    assert trainer_cells(compared)[3] == "1.0"  # the reference model
    assert asked[0].entropy
    assert trainer_cells(compared, lora_rank=8)[3] == "0.0"  # it is the model without its adapters
