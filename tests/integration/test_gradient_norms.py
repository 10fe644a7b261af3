"""Norms of single trajectories' gradients: those of plain PyTorch in float64, in every layout of real ranks, and those
that megatron finds for a step on that trajectory alone.

# covers: C12
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.backends.megatron.backend import MegatronBackend
from tests.integration.megatron_scenario import Case, Layout, each_case, make_backend
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.selection import selected
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LAYOUTS = {
    "one-rank": Layout(),
    "one-rank-shared-prefixes": Layout(model={"share_prefixes": True}),
    "dp2": Layout(world_size=2),
    "dp2-overlap": Layout(
        world_size=2,
        micro_batches=2,
        model={"megatron_extra": ("--overlap-grad-reduce", "--bucket-size", "512")},  # several buckets
    ),
    "tp2": Layout(world_size=2, tensor=2, sequence_parallel=False, micro_batches=3),
    "tp2-sequence-parallel": Layout(world_size=2, tensor=2),
    "pp2": Layout(world_size=2, pipeline=2, micro_batches=2),
    "cp2": Layout(world_size=2, context=2),
    "dp2-pp2-virtual2": Layout(world_size=4, pipeline=2, virtual=2),
    "tp2-cp2": Layout(world_size=4, tensor=2, context=2),
}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
FAMILIES = {"tied": ("qwen3-tied", {"num_hidden_layers": 4}), "mixture": ("qwen3-moe", {"num_hidden_layers": 4})}
CASES = [
    *[(layout, "tied") for layout in LAYOUTS if layout != "dp2"],
    *[(layout, "mixture") for layout in LAYOUTS if layout not in ("dp2-overlap", "one-rank-shared-prefixes", "tp2")],
    *[(layout, "tied, LoRA") for layout in ("one-rank", "tp2-sequence-parallel", "pp2")],
]
AT_ONCE = {("one-rank", "tied"), ("dp2-overlap", "tied"), ("tp2-sequence-parallel", "mixture"), ("pp2", "tied, LoRA")}
AT_ONCE |= {("pp2", "tied"), ("cp2", "mixture")}
PARAMETERS = [
    pytest.param(case, id="/".join(case), marks=() if case in AT_ONCE else pytest.mark.long) for case in CASES
]


def trajectories() -> list[ToySample]:
    """Branches of eight trajectories. Where there are two data-parallel ranks, they share two of these and have both
    branches of a third on one. The last but one has a single token that carries loss.
    """
    numbers = (0, 0, 1, 2, 3, 4, 3, 5, 6, 7, 7)
    samples = [
        dataclasses.replace(sample, number=number, group=number)
        for sample, number in zip(toy_samples(len(numbers), seed=5), numbers, strict=True)
    ]
    mask = np.zeros_like(samples[8].loss_mask)
    mask[-1] = 1
    samples[8] = dataclasses.replace(samples[8], loss_mask=mask)
    return samples


@dataclass
class Observed:
    """On one rank."""

    squared_norms: dict[int, float]  # of the trajectories that it measured, where the last pipeline stage is
    log_weights: dict[int, float]
    stepped: dict[int, float]  # norm of the gradient of a step on this trajectory alone × its tokens
    grad_norms: tuple[float, float]  # of a step on all of them: when the norms were computed before it, and without


def observe_all(
    rank: int, world_size: int, store: dist.Store, root: Path, cases: Sequence[Case]
) -> dict[Case, Observed | str]:
    def observe(store: dist.Store, case: Case) -> Observed:
        layout = LAYOUTS[case[0]]
        family, _, adapters = case[1].partition(", ")
        layout = dataclasses.replace(layout, model={**layout.model, **(LORA if adapters else {})})
        backend = make_backend(rank, world_size, store, root / family, layout, lr=0.0, min_lr=0.0, weight_decay=0.0)
        found = _observe(backend, layout.micro_batches)
        backend.close()
        return found

    return each_case(cases, store, observe)


def _observe(backend: MegatronBackend, micro_batches: int) -> Observed:
    from miles_async.backends.megatron.gradient_norms import GradientNorms

    runner, samples = backend._runner, trajectories()
    norms = GradientNorms(policy=runner.policy.model, scorer=runner.scorer, layout=runner.layout, device=runner.device)
    size, rank = backend.data_parallel_size, backend.data_parallel_rank
    shard = to_shards([samples], dp_size=size, micro_batches=micro_batches)[rank]
    without = backend.train(shard)["grad_norm"]
    found = norms.of(shard)
    after = backend.train(shard)["grad_norm"]
    stepped = {}
    for number in {sample.number for sample in samples}:
        alone = [dataclasses.replace(sample, advantage=1.0) for sample in samples if sample.number == number]
        of_rank = to_shards([alone], dp_size=size, micro_batches=1)[rank]
        stepped[number] = backend.train(of_rank)["grad_norm"] * of_rank.loss_tokens[0]
    numbers = [] if found is None else found.group_ids.tolist()
    return Observed(
        squared_norms={} if found is None else dict(zip(numbers, found.squared_norms.tolist(), strict=True)),
        log_weights={} if found is None else dict(zip(numbers, found.log_weights.tolist(), strict=True)),
        stepped=stepped,
        grad_norms=(after, without),
    )


@functools.cache
def reference(directory: Path) -> dict[int, tuple[float, float]]:
    """(squared norm, log w) of each trajectory."""
    plain = PlainTrainer(directory, lr=0.0)
    plain.model.double()
    totals: dict[int, torch.Tensor] = {}
    rollout: dict[int, float] = {}
    for sample in trajectories():
        mask = torch.tensor(sample.loss_mask[1:]) == 1
        own = plain.logprobs(sample.tokens)[mask].sum()
        totals[sample.number] = totals.get(sample.number, torch.zeros(())) + own
        rollout[sample.number] = rollout.get(sample.number, 0.0) + float(
            sample.rollout_logprobs[1:].astype(np.float64)[mask.numpy()].sum()
        )
    found = {}
    for number, total in totals.items():
        gradients = torch.autograd.grad(total, plain.trained, allow_unused=True)
        squares = [float(gradient.square().sum()) for gradient in gradients if gradient is not None]
        found[number] = sum(squares), total.item() - rollout[number]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (family, config) in FAMILIES.items():
        save_tiny(family, root / name, **config)
    return root


@pytest.fixture(scope="module")
def observe(root: Path, request: pytest.FixtureRequest) -> Callable[[Case], list[Observed]]:
    """Case → observations of every rank; processes start once for all cases of as many ranks."""
    cases: list[Case] = selected(request, "case")

    @functools.cache
    def of_size(size: int) -> list[dict[Case, Observed | str]]:
        chosen = [case for case in cases if LAYOUTS[case[0]].world_size == size]
        return run_ranks(size, observe_all, root, chosen, timeout=250)

    def of_case(case: Case) -> list[Observed]:
        found = [of_rank[case] for of_rank in of_size(LAYOUTS[case[0]].world_size)]
        for one in found:
            assert isinstance(one, Observed), one
        return found  # type: ignore[return-value]

    return of_case


@pytest.mark.parametrize("case", PARAMETERS)
def test_norms_are_those_of_each_trajectory_alone(
    case: Case, observe: Callable[[Case], list[Observed]], root: Path
) -> None:
    ranks = observe(case)
    every = {number for one in ranks for number in one.squared_norms}
    assert every == {sample.number for sample in trajectories()}
    for one in ranks:
        for number, squared in one.squared_norms.items():
            assert squared**0.5 == pytest.approx(one.stepped[number], rel=2e-4), number
    if "LoRA" in case[1]:  # its first matrices are drawn by chance
        return
    expected = reference(root / case[1])
    for one in ranks:
        for number, squared in one.squared_norms.items():
            assert squared == pytest.approx(expected[number][0], rel=1e-4), number
            assert one.log_weights[number] == pytest.approx(expected[number][1], abs=1e-4), number


@pytest.mark.parametrize("case", PARAMETERS)
def test_one_data_parallel_rank_measures_each(case: Case, observe: Callable[[Case], list[Observed]]) -> None:
    measured = [number for one in observe(case) for number in one.squared_norms]
    copies = LAYOUTS[case[0]].tensor * LAYOUTS[case[0]].context  # ranks of the last stage that know the same
    assert Counter(measured) == dict.fromkeys(range(8), copies)


@pytest.mark.parametrize("case", PARAMETERS)
def test_steps_afterwards_have_their_own_gradient(case: Case, observe: Callable[[Case], list[Observed]]) -> None:
    for one in observe(case):
        after, without = one.grad_norms
        assert after == pytest.approx(without, rel=1e-6)
        assert without > 0
