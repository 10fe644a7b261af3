"""Checkpoints of MegatronBackend in other layouts of ranks and under other flags; what cannot be written or read is one
of our errors, whatever megatron and torch raise.

Two ranks save in every layout, in the background of two more steps, and load each other's checkpoints; then one rank
and four load them. Tests only compare.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.backends.megatron.distributed import together
from miles_async.errors import CheckpointError
from miles_async.runtime.rank_records import gather_records
from miles_async.types import Float32
from tests.integration.megatron_scenario import (
    LR,
    SEQUENCES,
    Case,
    Layout,
    each_case,
    export_differences,
    leave_groups,
    make_backend,
)
from tests.integration.rank_processes import run_ranks
from tests.integration.selection import selected
from tests.integration.tiny_models import save_tiny, split_files
from tests.integration.toy_batches import to_shards, toy_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SEED, SAVED_AT = 1234, 2  # the seed of ModelArguments; optimizer steps before the save
LAYOUTS = {
    "dp2": Layout(2),
    "tp2": Layout(2, tensor=2),
    "pp2": Layout(2, pipeline=2),
    "ep2": Layout(2, expert=2),
    "tp2-ep2": Layout(2, tensor=2, expert=2, expert_tensor=1),
    "cp2": Layout(2, context=2),
    "pp2-virtual2": Layout(2, pipeline=2, virtual=2, micro_batches=2),
    "pp2-unequal": Layout(2, pipeline=2, first_stage_layers=3),
    "one": Layout(1),
    "dp2-tp2": Layout(4, tensor=2),
    "tp2-ep2-etp2": Layout(4, tensor=2, expert=2, expert_tensor=2),
}
Load = tuple[str, str, str]
"""(layout of the save, layout, model), by name."""
SAVED: list[Case] = [(layout, model) for layout in ("dp2", "tp2", "pp2") for model in ("qwen3-tied", "qwen3-moe")]
SAVED.append(("ep2", "qwen3-moe"))
PAIRS = [(source, target, model) for source, model in SAVED for target, of in SAVED if of == model and source != target]
SINGLE: list[Load] = [
    ("dp2", "cp2", "qwen3-tied"),
    ("cp2", "tp2", "qwen3-tied"),
    ("pp2", "pp2-virtual2", "qwen3-tied"),
    ("pp2-virtual2", "dp2", "qwen3-tied"),
    ("pp2-unequal", "tp2", "qwen3-tied"),
    ("dp2", "pp2-unequal", "qwen3-tied"),
    ("tp2", "pp2", "qwen3-next"),
    ("tp2", "pp2", "nemotron-h"),
    ("tp2", "pp2", "gemma4"),
]
SAVED += [("cp2", "qwen3-tied"), ("pp2-virtual2", "qwen3-tied"), ("pp2-unequal", "qwen3-tied")]
# Norms after attention; sinks, biases of experts; linear attention and Mamba-2, with several tensors in one; heads that
# differ by layer.
SAVED += [("tp2", "glm4"), ("tp2-ep2", "gpt-oss"), ("tp2", "qwen3-next"), ("tp2", "nemotron-h"), ("tp2", "gemma4")]
OF_OTHERS: list[Case] = [("dp2", "qwen3-tied"), ("dp2", "qwen3-moe")]  # of the tests below that load no other layout
LOADED: dict[int, list[Load]] = {  # by number of ranks
    2: [*PAIRS, *SINGLE],
    1: [(source, "one", model) for source, model in SAVED],
    4: [
        ("pp2", "dp2-tp2", "qwen3-tied"),
        ("dp2", "tp2-ep2-etp2", "qwen3-moe"),
        ("ep2", "tp2-ep2-etp2", "qwen3-moe"),
    ],
}
# Every dimension once each way, every family once.
BY_DAY = {
    *((source, target, "qwen3-tied") for source, target in (("dp2", "tp2"), ("tp2", "pp2"), ("pp2", "dp2"))),
    *((source, target, "qwen3-moe") for source, target in (("dp2", "ep2"), ("ep2", "tp2"))),
    *((source, target, "qwen3-tied") for source, target in (("dp2", "cp2"), ("pp2", "pp2-virtual2"))),
    *(("pp2-unequal", "tp2", "qwen3-tied"), ("pp2", "dp2-tp2", "qwen3-tied")),
    *(("tp2", "pp2", family) for family in ("qwen3-next", "nemotron-h", "gemma4")),
    *(("tp2", "one", "glm4"), ("tp2-ep2", "one", "gpt-oss")),
}
CASES = [
    pytest.param(case, id=" ".join(case), marks=() if case in BY_DAY else pytest.mark.long)
    for cases in LOADED.values()
    for case in cases
]
OTHER_FLAGS = {
    "lr": 1e-5, "min_lr": 1e-6, "lr_decay_style": "linear", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6,
    "ppo_epochs": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Resumed:
    """On one rank."""

    differs: list[str]  # tensors, from the export at the save
    steps: list[dict[str, float]]
    logprobs: list[list[float]]  # after these steps
    draws: list[float]  # the first that are made after the load


# ------------------------------------------------------------------------------------------- in the ranks
def _train(backend: MegatronBackend, seeds: range) -> list[dict[str, float]]:
    part, parts = backend.data_parallel_rank, backend.data_parallel_size
    return [
        backend.train(to_shards([toy_samples(8, seed=seed)], dp_size=parts, micro_batches=1)[part]) for seed in seeds
    ]


def _save(rank: int, world_size: int, store: dist.Store, case: Case, root: Path) -> Resumed:
    backend = make_backend(rank, world_size, store, root / case[1], LAYOUTS[case[0]])
    _train(backend, range(SAVED_AT))
    backend.stage_save(root / "-".join(case) / "checkpoint")
    assert all(staged._writer.write_buckets is None for staged in backend._staged or ()), "a second copy of the state"
    backend.save_hf(root / "-".join(case) / "hf")
    steps = _train(backend, range(SAVED_AT, SAVED_AT + 2))
    parts = gather_records(together(backend.write_save), bytes)  # of the state before these steps
    together(lambda: backend.finish_save(parts) if rank == 0 else None)
    seen = Resumed([], steps, backend.logprobs(SEQUENCES), [])
    backend.close()
    return seen


def _load(backend: MegatronBackend, saved: Path) -> Resumed:
    backend.load(saved / "checkpoint")
    draws = torch.rand(3).tolist()
    differs = export_differences(backend, saved / "hf")
    return Resumed(differs, _train(backend, range(SAVED_AT, SAVED_AT + 2)), backend.logprobs(SEQUENCES), draws)


def _load_each(
    rank: int, world_size: int, store: dist.Store, case: Case, sources: list[str], root: Path
) -> dict[str, Resumed]:
    """Load the checkpoints of all ``sources`` into one backend, one after another: the first finds it untrained, the
    others find what the one before has left.
    """
    target, model = case
    backend = make_backend(rank, world_size, store, root / model, LAYOUTS[target])
    seen = {source: _load(backend, root / f"{source}-{model}") for source in sources}
    backend.close()
    return seen


def _other_flags(rank: int, world_size: int, store: dist.Store, root: Path) -> tuple[Resumed, list[dict[str, Any]]]:
    backend = make_backend(rank, world_size, store, root / "qwen3-tied", LAYOUTS["dp2"], **OTHER_FLAGS)
    seen = _load(backend, root / "dp2-qwen3-tied")
    groups = [
        {k: v for k, v in group.items() if k != "params"} for group in backend._runner.policy.optimizer.param_groups
    ]
    backend.close()
    return seen, groups


def _other_dtype(rank: int, world_size: int, store: dist.Store, root: Path) -> Float32:
    """This rank's fp32 weights, as loaded from a checkpoint of bf16 training."""
    for number, bf16 in enumerate((True, False)):
        of_one = dist.PrefixStore(str(number), store)
        backend = make_backend(rank, world_size, of_one, root / "qwen3-tied", LAYOUTS["dp2"], bf16=bf16)
        if bf16:
            _train(backend, range(SAVED_AT))
            backend.save(root / "in-bf16")
        else:
            backend.load(root / "in-bf16")
            parameters = [each for module in backend._model.modules for each in module.parameters()]
        backend.close()
    return torch.cat([each.detach().flatten() for each in parameters]).numpy()


def _disk_full(rank: int, world_size: int, store: dist.Store, root: Path) -> str:
    backend = make_backend(rank, world_size, store, root / "qwen3-tied", LAYOUTS["dp2"])
    with _small_files():
        return _refusal(lambda: backend.save(root / "full"))


def _disk_full_of_exports(rank: int, world_size: int, store: dist.Store, root: Path) -> str:
    backend = make_backend(rank, world_size, store, root / "qwen3-tied", LAYOUTS["one"])
    with _small_files():
        return _refusal(lambda: backend.save_hf(root / "full-export"))


@contextlib.contextmanager
def _small_files() -> Iterator[None]:
    """No file may grow beyond 64 KiB, for which the kernel gives an error as for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _truncated(rank: int, world_size: int, store: dist.Store, root: Path) -> str:
    backend = make_backend(rank, world_size, store, root / "qwen3-tied", LAYOUTS["dp2"])
    backend.save(root / "truncated")
    shard = sorted((root / "truncated").glob("*.distcp"))[rank]
    with shard.open("rb+") as file:
        file.truncate(shard.stat().st_size // 2)
    dist.barrier()
    return _refusal(lambda: backend.load(root / "truncated"))


def _other_model(rank: int, world_size: int, store: dist.Store, root: Path) -> str:
    backend = make_backend(rank, world_size, store, root / "qwen3-tied", LAYOUTS["dp2"])
    return _refusal(lambda: backend.load(root / "dp2-qwen3-moe" / "checkpoint"))


def _refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    finally:
        leave_groups()
    return "nothing was raised"


FAILURES = {"disk full": _disk_full, "truncated": _truncated, "other model": _other_model}


def _two_ranks(rank: int, world_size: int, store: dist.Store, root: Path, chosen: list[Load]) -> dict[Any, Any]:
    def observe(store: dist.Store, case: Any) -> Any:
        if case[0] == "fails":
            return FAILURES[case[1]](rank, world_size, store, root)
        if case[0] == "flags":
            return (_other_flags if case[1] == "other" else _other_dtype)(rank, world_size, store, root)
        return _save(rank, world_size, store, case, root)

    saved = [case for case in SAVED if case in {*OF_OTHERS, *((source, model) for source, _, model in chosen)}]
    cases = [*saved, ("flags", "other"), ("flags", "dtype"), *(("fails", name) for name in FAILURES)]
    return each_case(cases, store, observe) | _loads(rank, world_size, store, root, chosen)


def _one_rank(rank: int, world_size: int, store: dist.Store, root: Path, chosen: list[Load]) -> dict[Any, Any]:
    seen = _loads(rank, world_size, store, root, chosen)
    case: Any = ("fails", "disk full of exports")
    return seen | each_case([case], store, lambda store, _: _disk_full_of_exports(rank, world_size, store, root))


def _loads(rank: int, world_size: int, store: dist.Store, root: Path, chosen: list[Load]) -> dict[Any, Any]:
    from miles_async.backends.megatron.platform import Platform

    Platform.named("cpu").prepare(0)
    sources: dict[Case, list[str]] = {}
    for source, target, model in chosen:
        if LAYOUTS[target].world_size != world_size:
            continue
        sources.setdefault((target, model), []).append(source)
    loads: Any = [("load", *case) for case in sources]
    seen: dict[Any, Any] = each_case(
        loads, store, lambda store, case: _load_each(rank, world_size, store, case[1:], sources[case[1:]], root)
    )
    return {
        (source, *case): found if isinstance(found := seen["load", *case], str) else found[source]
        for case, of_case in sources.items()
        for source in of_case
    }


# -------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Any, list[Any]]:
    """Observations of each rank in each selected case, or a traceback."""
    chosen: list[Load] = selected(request, "case")
    root = tmp_path_factory.mktemp("resharding")
    split_files(save_tiny("qwen3-moe", root / "qwen3-moe", num_hidden_layers=2), 3)  # two ranks write their exports
    for family in ("glm4", "gpt-oss", "qwen3-next", "nemotron-h", "gemma4"):
        save_tiny(family, root / family)
    save_tiny("qwen3-tied", root / "qwen3-tied", num_hidden_layers=4)  # two virtual stages on each of two ranks
    ranks = [run_ranks(2, _two_ranks, root, chosen, timeout=300), run_ranks(1, _one_rank, root, chosen, timeout=200)]
    if any(LAYOUTS[target].world_size == 4 for _, target, _ in chosen):
        ranks.append(run_ranks(4, _loads, root, chosen, timeout=200))
    return {case: [rank[case] for rank in of_world] for of_world in ranks for case in of_world[0]}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_in_another_layout(seen: dict[object, list[object]], case: Load) -> None:
    # covers: C9
    source, _, model = case
    saved = seen[source, model][0]
    assert isinstance(saved, Resumed), saved
    for rank in seen[case]:
        assert isinstance(rank, Resumed), rank
        assert rank.differs == []  # every bit of the weights
        for ours, expected in zip(rank.steps, saved.steps, strict=True):
            assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
            assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for ours, expected in zip(rank.logprobs, saved.logprobs, strict=True):
            assert ours == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_another_layout_seeds_the_generators_again(seen: dict[Any, list[Any]], case: Load) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(SEED + SAVED_AT)).tolist()
    # The experts' ranks are data-parallel ranks, virtual stages are on the same ranks.
    same_grid = case[:2] in (("dp2", "ep2"), ("ep2", "dp2"), ("pp2", "pp2-virtual2"))
    for rank in seen[case]:
        assert (rank.draws == expected) is not same_grid


def test_flags_win_over_what_was_saved(seen: dict[Any, list[Any]]) -> None:
    # covers: C9
    for rank in seen["flags", "other"]:
        assert not isinstance(rank, str), rank
        resumed, groups = rank
        assert resumed.differs == []
        for rollout, found in enumerate(resumed.steps, SAVED_AT + 1):
            assert found["lr"] == pytest.approx(1e-6 + 9e-6 * (1 - 2 * rollout / 10))  # of 10 steps, two per rollout
        for group in groups:
            assert (group["max_lr"], group["min_lr"]) == (1e-5, 1e-6)
            assert (*group["betas"], group["eps"]) == (0.8, 0.9, 1e-6)
    assert seen["dp2", "qwen3-tied"][0].steps[0]["lr"] == LR
    resumed, _ = seen["flags", "other"][0]
    difference = [
        abs(ours - other)
        for row, usual in zip(resumed.logprobs, seen["dp2", "qwen3-tied"][0].logprobs, strict=True)
        for ours, other in zip(row, usual, strict=True)
    ]
    assert max(difference) > 1e-3  # it really trained at another rate


def test_training_in_bf16_goes_on_in_fp32_with_the_exact_weights_on_every_rank(seen: dict[Any, list[Any]]) -> None:
    # covers: C9
    one, other = seen["flags", "dtype"]
    assert np.array_equal(one, other)
    weights = torch.from_numpy(one)
    assert (weights != weights.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("disk full", ("cannot write", "full", "File too large")),
        ("disk full of exports", ("--save-hf", "full-export", "File too large")),
        ("truncated", ("cannot read", "truncated")),
        ("other model", ("cannot read", "dp2-qwen3-moe")),
    ],
)
def test_what_megatron_raises_becomes_a_checkpoint_error(
    seen: dict[Any, list[Any]], failure: str, expected: tuple[str, ...]
) -> None:
    """Even torch's CheckpointException, which is no Exception."""
    # covers: C10
    refusals = seen["fails", failure]
    for part in expected:
        assert part in refusals[0]
    for refusal in refusals:
        assert refusal.startswith(expected[0])
        assert "Traceback" not in refusal
