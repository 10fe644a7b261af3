"""``--overlap-param-gather``: parameters are gathered during the next forward pass, and every bit is what it would be
without. What reads parameters otherwise (exports, scores, the copy of an embedding) finds them complete.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from miles_async.arguments.algorithm import AlgorithmArguments
from tests.integration.megatron_scenario import PLAIN, SEQUENCES, Layout, make_backend, rollout_steps, shard_of
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny, save_with_ahead_layers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

AT_ONCE = ("--overlap-grad-reduce", "--bucket-size", "512")  # several buckets
OVERLAPPED = (*AT_ONCE, "--overlap-param-gather")
PPO = AlgorithmArguments(token_advantages="gae", use_rollout_logprobs=True)
AHEAD = "with layers for multi-token prediction"


@dataclass(frozen=True)
class Case:
    family: str
    layout: Layout
    algorithm: AlgorithmArguments = PLAIN


CASES = {
    "dp2": Case("qwen3", Layout(2, micro_batches=2)),
    "dp2, a critic": Case("qwen3-tied", Layout(2), PPO),
    "dp2, DoRA": Case("qwen3-moe", Layout(2, model={"lora_rank": 4, "lora_type": "dora"})),
    "dp4-ep2": Case("qwen3-moe", Layout(4, expert=2)),
    "dp2-pp2-virtual2, recomputed": Case(
        "qwen3-tied", Layout(4, pipeline=2, virtual=2, model={"recompute_granularity": "full"})
    ),
    "dp2-pp2, layers ahead": Case(AHEAD, Layout(4, pipeline=2, model={"enable_mtp_training": True})),
}


@dataclass(frozen=True)
class Observed:
    """On one rank, after one rollout step and after two."""

    metrics: list[dict[str, float]]
    logprobs: list[list[list[float]]]
    exported: list[dict[str, np.ndarray]]


def observe(rank: int, world_size: int, store: dist.Store, root: Path, case: Case) -> list[Observed]:
    """Without overlapped gathers, and with them."""
    seen = []
    for number, flags in enumerate((AT_ONCE, OVERLAPPED)):
        layout = dataclasses.replace(case.layout, model={**case.layout.model, "megatron_extra": flags})
        place = dist.PrefixStore(str(number), store)
        backend = make_backend(rank, world_size, place, root / case.family, layout, case.algorithm)
        observed = Observed([], [], [])
        for steps in rollout_steps(3)[:2]:  # gathers between the optimizer steps of one rollout step
            metrics = backend.train(shard_of(backend, steps, layout.micro_batches))
            observed.metrics.append({**metrics, "step_seconds": 0.0})
            observed.exported.append({name: tensor.numpy().copy() for name, tensor in backend.export_weights()})
            observed.logprobs.append(backend.logprobs(SEQUENCES))
        backend.close()
        seen.append(observed)
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3-moe"):
        save_tiny(family, root / family)
    save_tiny("qwen3-tied", root / "qwen3-tied", num_hidden_layers=4)
    own, _ = save_with_ahead_layers("glm4-moe", root)
    own.rename(root / AHEAD)
    return root


@pytest.mark.parametrize(
    "name", [name if name == "dp2" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_every_bit_is_that_of_a_gather_after_the_step(name: str, root: Path) -> None:
    case = CASES[name]
    ranks = run_ranks(case.layout.world_size, observe, root, case, timeout=200)
    for plain, overlapped in ranks:
        assert overlapped.metrics == plain.metrics
        assert overlapped.logprobs == plain.logprobs
        for ours, expected in zip(overlapped.exported, plain.exported, strict=True):
            assert ours.keys() == expected.keys()
            assert [tensor for tensor in ours if not np.array_equal(ours[tensor], expected[tensor])] == []
    assert ranks[0][0].metrics[0]["optimizer_steps"] == 3


def score_on_one_rank(rank: int, world_size: int, store: dist.Store, directory: Path) -> int:
    backend = make_backend(rank, world_size, store, directory, Layout(2, model={"megatron_extra": OVERLAPPED}))
    rows = backend.logprobs(SEQUENCES) if rank == 0 else []
    dist.barrier()
    backend.close()
    return len(rows)


def test_ranks_may_score_different_sequences_before_the_first_step(root: Path) -> None:
    """Replicas of a model exchange nothing to score: a gather would wait for the other rank."""
    assert run_ranks(2, score_on_one_rank, root / "qwen3", timeout=100) == [len(SEQUENCES), 0]
