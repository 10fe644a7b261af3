"""``--deterministic-mode``: two trainings with the same flags on the same data end with the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.integration.megatron_scenario import (
    CORRECTED,
    Case,
    Layout,
    each_case,
    make_backend,
    rollout_steps,
    shard_of,
)
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DETERMINISTIC = ("--deterministic-mode",)
LAYOUTS = {
    "dp2": Layout(2, micro_batches=2, model={"megatron_extra": DETERMINISTIC}),
    "adapters": Layout(2, model={"megatron_extra": DETERMINISTIC, "lora_rank": 4}),  # which begin with random numbers
}
CASES: list[Case] = [("dp2", "qwen3-moe"), ("adapters", "qwen3")]


@dataclass(frozen=True)
class Observed:
    """On one rank, after three rollout steps."""

    deterministic: bool  # the kernels that torch takes
    metrics: list[dict[str, float]]
    exported: dict[str, np.ndarray]


def train_all(rank: int, world_size: int, store: dist.Store, root: Path) -> dict[Case, Observed | str]:
    # Both runs are forked from one process: here, too, generators begin as those of a new process do.
    random.seed()
    np.random.seed()
    torch.seed()

    def train(store: dist.Store, case: Case) -> Observed:
        layout = LAYOUTS[case[0]]
        backend = make_backend(rank, world_size, store, root / case[1], layout, CORRECTED)
        metrics = []
        for steps in rollout_steps(2):
            metrics.append({**backend.train(shard_of(backend, steps, layout.micro_batches)), "step_seconds": 0.0})
        exported = {name: tensor.numpy().copy() for name, tensor in backend.export_weights()}
        backend.close()
        return Observed(torch.are_deterministic_algorithms_enabled(), metrics, exported)

    return each_case(CASES, store, train)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[Case, Any]]]:
    """Observations of the ranks of two runs, each in its own processes."""
    root = tmp_path_factory.mktemp("models")
    for _, family in CASES:
        save_tiny(family, root / family)
    return [run_ranks(2, train_all, root, timeout=120) for _ in range(2)]


@pytest.mark.parametrize("case", CASES, ids="/".join)
def test_two_trainings_end_with_the_same_bits(runs: list[list[dict[Case, object]]], case: Case) -> None:
    for one, other in zip(*([rank[case] for rank in run] for run in runs), strict=True):
        assert isinstance(one, Observed), one
        assert isinstance(other, Observed), other
        assert one.deterministic
        assert one.metrics == other.metrics
        assert one.exported.keys() == other.exported.keys()
        assert [name for name, weight in one.exported.items() if not np.array_equal(weight, other.exported[name])] == []
