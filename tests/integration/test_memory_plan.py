"""Memory told before a run, against what real ranks take."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.model import ModelArguments, RecomputeGranularity
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.memory.plan import (
    _measure,
    measure,
    model_parameters,
    rank_bytes,
)
from miles_async.backends.megatron.memory.stages import StageMemory, StageRequest
from miles_async.errors import ConfigurationError
from tests.integration.megatron_scenario import Layout, make_backend
from tests.integration.rank_processes import forked_context, run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import long_sample_shard

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOKENS = 2048
CHUNK = OptimizerArguments().logprob_chunk
VOCABULARY = 16384
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
WITHIN = 0.1  # of what was told
MMAP_THRESHOLD = -3  # of malloc.h

Recompute = RecomputeGranularity | None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "small": save_tiny("qwen3", root / "small"),
        "gemma": save_tiny("gemma", root / "gemma"),
        "latent": save_tiny("deepseek-v3", root / "latent"),
        "hybrid": save_tiny("qwen3.5", root / "hybrid"),
        "state space": save_tiny("nemotron-h", root / "state-space"),
        "dense": save_tiny("qwen3", root / "dense", **SIZES),
        "mixture": save_tiny("qwen3-moe", root / "mixture", **SIZES, moe_intermediate_size=512, num_experts=8),
    }


def request(directory: Path, world_size: int = 1, *, bf16: bool = False, **model: object) -> StageRequest:
    return StageRequest(
        directory=directory,
        model=ModelArguments(bf16=bf16, **model),
        world_size=world_size,
        tokens=TOKENS,
        logprob_chunk=CHUNK,
        temperature=1.0,
        entropy=False,
    )


def measure_here(request: StageRequest) -> list[StageMemory]:
    """Measure as ``measure`` does, in a process that need not import Megatron again, what the request asks for."""
    return run_ranks(1, _measured, request)[0][request.model.recompute_granularity]


def _measured(
    rank: int, world_size: int, store: dist.Store, request: StageRequest
) -> Mapping[Recompute, list[StageMemory]]:
    return _measure(request)


def _real_rank(
    rank: int,
    world_size: int,
    store: dist.Store,
    directories: list[Path],
    layout: Layout,
    recompute: Recompute,
    algorithm: AlgorithmArguments,
    saves: Path,
) -> tuple[int, int, int]:
    """(Elements of parameters; bytes at the peak of a step; bytes of the copy for a save) of the last model; the first
    one has warmed up all else.
    """
    # Freed memory goes back at once: what is resident is what is in use.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    parameters = peak = copied = 0
    for index, directory in enumerate(directories):
        gc.collect()
        before = _resident("VmRSS")
        backend = make_backend(
            rank,
            world_size,
            dist.PrefixStore(f"{index}", store),
            directory,
            layout,
            algorithm,
            recompute=recompute,
            logprob_chunk=CHUNK,
        )
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over
        tokens = TOKENS if directory == directories[-1] else 64
        ranks, micro_batches = backend.data_parallel_size, layout.micro_batches
        backend.train(long_sample_shard(tokens, ranks=ranks, micro_batches=micro_batches))
        peak = _resident("VmHWM") - before
        parameters = sum(parameter.numel() for module in backend._model.modules for parameter in module.parameters())
        backend.stage_save(saves / f"{index}")
        memories = [buffer._memory for buffer in backend._host_buffers.values()]
        copied = sum(memory.nbytes for memory in memories if memory is not None)
        backend.close()
        del backend
    return parameters, peak, copied


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


CASES = {
    "dense": ("dense", 1, None),
    "dense-recomputed": ("dense", 1, "full"),
    "dense-tp2": ("dense", 2, None),
    "mixture": ("mixture", 1, None),
    "dense-dp2": ("dense", 2, None),
    "dense-tp2-adapters": ("dense", 2, None),
    "dense-critic": ("dense", 1, None),
    "dense-pp2": ("dense", 2, None),
}
ADAPTED = {"lora_rank": 64, "lora_type": "dora"}


@pytest.mark.parametrize(
    "case",
    [
        "dense",
        "mixture",
        *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case not in ("dense", "mixture")),
    ],
)
def test_a_rank_takes_what_was_told(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    family, world_size, recompute = CASES[case]
    adapters = ADAPTED if case.endswith("adapters") else {}
    tensor, pipeline = (world_size if f"{axis}2" in case else 1 for axis in ("tp", "pp"))
    micro_batches = 4 if pipeline > 1 else 1  # more than the stages keep at one time
    layout = Layout(
        world_size=world_size, tensor=tensor, pipeline=pipeline, micro_batches=micro_batches, model=adapters
    )
    critic = case.endswith("critic")
    algorithm = AlgorithmArguments(token_advantages="gae") if critic else AlgorithmArguments()
    directories = [models["small"], models[family]]
    measured = run_ranks(world_size, _real_rank, directories, layout, recompute, algorithm, tmp_path)
    split = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "recompute_granularity": recompute,
    }
    asked = request(models[family], world_size, **split, **adapters)
    stages = measure(asked)[recompute] if case == "dense" else measure_here(asked)
    assert len(stages) == pipeline
    for (parameters, peak, _), stage in zip(measured[:: world_size // pipeline], stages, strict=True):
        told = rank_bytes(stage, asked.model, world_size, reference=False, critic=critic, bucket=0, copies_saves=True)
        assert stage.parameters + stage.expert_parameters + stage.adapters + stage.expert_adapters == parameters
        assert bool(stage.adapters) == bool(adapters)
        assert peak == pytest.approx(told.total, rel=WITHIN), f"stage {stage.stages.start}"
        # One replica copies for all.
        copies = [told.saved_copy, 0] if "dp" in case else [told.saved_copy] * (world_size // pipeline)
        found = [copied for _, _, copied in measured[stage.stages.start * len(copies) :][: len(copies)]]
        assert found == pytest.approx(copies, rel=WITHIN, abs=1024)


def test_every_recomputation_is_measured_as_if_it_was_asked_for(models: dict[str, Path]) -> None:
    """Whatever flags of another one are given."""
    plain = run_ranks(1, _measured, request(models["dense"]))[0]
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    compared = run_ranks(1, _measured, request(models["dense"], **block))[0]
    assert list(plain) == [None, "selective", "full"]
    assert [compared[each] for each in (None, "selective")] == [plain[each] for each in (None, "selective")]
    kept = [plain[each][0].kept for each in plain]
    assert kept == sorted(kept, reverse=True)
    assert plain["full"][0].kept < compared["full"][0].kept < plain[None][0].kept  # one of the four layers


def test_recomputation_that_megatron_refuses_is_left_out(models: dict[str, Path]) -> None:
    split = {"tensor_model_parallel_size": 2, "megatron_extra": ("--distribute-saved-activations",)}
    assert list(run_ranks(1, _measured, request(models["small"], 2, **split))[0]) == [None]


@pytest.mark.parametrize(
    ("family", "key_and_value"),
    [
        ("small", 1 * 2 * 16),  # one KV head of two on each of two ranks
        pytest.param("gemma", 2 * 2 * 16, marks=pytest.mark.long),  # two of four
        pytest.param("latent", 2 * (16 + 8 + 24), marks=pytest.mark.long),  # two of four, uncompressed
    ],
)
def test_keys_and_values_of_other_ranks_are_counted(models: dict[str, Path], family: str, key_and_value: int) -> None:
    """One layer keeps those of the tokens of three other ranks."""
    split = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    [alone] = measure_here(request(models[family], 2, tensor_model_parallel_size=2, bf16=True))
    [stage] = measure_here(request(models[family], 8, **split, bf16=True))
    assert (alone.received, stage.received) == (0, 3 * TOKENS * key_and_value * 2)
    assert stage.activations == alone.activations + stage.received


@pytest.mark.parametrize("family", ["hybrid", "state space"])
def test_recurrences_keep_what_their_kernels_keep(models: dict[str, Path], family: str) -> None:
    """Twice the tokens keep twice as much: no matrix over pairs of tokens, and no state per token."""
    asked = request(models[family])
    [stage], [longer] = measure_here(asked), measure_here(replace(asked, tokens=2 * TOKENS))
    with safe_open(models[family] / "model.safetensors", "pt") as weights:
        sizes = [math.prod(weights.get_slice(name).get_shape()) for name in weights.keys()]
    assert stage.parameters == sum(sizes)
    assert longer.kept == pytest.approx(2 * stage.kept, rel=0.01)
    assert stage.kept < longer.peak < 2.1 * stage.peak


def test_adapters_in_bf16_are_counted(models: dict[str, Path]) -> None:
    """The bridge converts them, which fake tensors must allow; what is trained is the same."""
    in_bf16, in_fp32 = (measure_here(request(models["dense"], bf16=bf16, lora_rank=8))[0] for bf16 in (True, False))
    assert in_bf16.adapters == in_fp32.adapters > 0
    assert in_bf16.kept < in_fp32.kept


def test_stages_and_ranks_add_up_to_the_model(models: dict[str, Path]) -> None:
    """Split in every way, a mixture has the parameters of the unsplit one, but for what ranks have copies of."""
    whole = measure_here(request(models["mixture"]))
    split = request(
        models["mixture"],
        32,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    stages = measure_here(split)
    assert [stage.stages for stage in stages] == [range(1), range(1, 3), range(3, 4)]
    alone = model_parameters(whole, ModelArguments())
    copies = model_parameters(stages, split.model) - alone
    assert 0 < copies < 0.01 * alone  # norms and routers
    assert sum(stage.expert_parameters * len(stage.stages) for stage in stages) * 4 == whole[0].expert_parameters


@pytest.mark.long
def test_virtual_stages_hold_the_same_parameters_and_more_activations(models: dict[str, Path]) -> None:
    whole = measure_here(request(models["dense"], 2, pipeline_model_parallel_size=2))
    virtual = measure_here(
        request(models["dense"], 2, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    )
    assert [stage.parameters for stage in virtual] == [stage.parameters for stage in whole]
    assert [stage.under_way for stage in whole] == [2, 1]
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", figure 4: of smaller stages.
    assert [stage.under_way for stage in virtual] == [5, 3]
    for part, stage in zip(virtual, whole, strict=True):
        assert 0.4 * stage.kept < part.kept < 0.7 * stage.kept


def test_what_megatron_cannot_build_is_an_error(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    context = forked_context()  # its child need not import megatron again
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        measure(request(models["dense"], 3, tensor_model_parallel_size=3))
