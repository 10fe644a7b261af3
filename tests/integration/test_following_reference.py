"""A reference model that follows the policy, and a KL coefficient that adapts: in real ranks, and over a checkpoint.

# covers: C12
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.arguments.algorithm import AlgorithmArguments
from tests.integration.megatron_scenario import SEQUENCES, Layout, make_backend, shard_of
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import toy_samples

if TYPE_CHECKING:
    from miles_async.backends.megatron.backend import MegatronBackend

Seen = dict[str, Any]  # what a rank saw, by name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS, INTERVAL = 5, 2
LAYOUTS = {
    "dp2": Layout(world_size=2, micro_batches=2),
    "tp2": Layout(world_size=2, tensor=2),
    "pp2": Layout(world_size=2, pipeline=2, micro_batches=2),
}


def algorithm(alpha: float) -> AlgorithmArguments:
    return AlgorithmArguments(
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_target=1e-4,
        kl_horizon=100,
        ref_update_interval=INTERVAL,
        ref_update_alpha=alpha,
    )


# ------------------------------------------------------------------------------------------- in the ranks
def _observe(rank: int, world_size: int, store: dist.Store, models: dict[str, Path], scratch: Path) -> Seen:
    seen: Seen = {}
    for name, layout, alpha, bf16 in (
        ("dp2", "dp2", 0.25, False),
        ("tp2", "tp2", 0.25, False),
        ("pp2", "pp2", 0.25, False),
        ("copy", "dp2", 1.0, False),
        ("bf16", "dp2", 0.25, True),
        ("moe", "dp2", 0.25, False),
    ):
        directory = models["qwen3-moe" if name == "moe" else "qwen3-tied"]
        backend = make_backend(
            rank, 2, dist.PrefixStore(name, store), directory, LAYOUTS[layout], algorithm(alpha), bf16=bf16
        )
        seen[name] = _followed(backend, alpha)
        backend.save(scratch / name)
        seen[name, "scored"] = _scored(backend)
        seen[name, "next"] = _train(backend, STEPS)
        backend.close()
    for name, saved in (
        ("dp2", "dp2"),
        ("pp2", "dp2"),
        ("dp2", "pp2"),
        ("tp2", "tp2"),
        ("bf16", "bf16"),
        ("moe", "moe"),
    ):
        layout, directory = LAYOUTS.get(name, LAYOUTS["dp2"]), models["qwen3-moe" if name == "moe" else "qwen3-tied"]
        backend = make_backend(
            rank, 2, dist.PrefixStore(f"{name} of {saved}", store), directory, layout, algorithm(0.25),
            bf16=name == "bf16",
        )  # fmt: skip
        backend.load(scratch / saved)
        seen[f"{name} of {saved}", "scored"] = _scored(backend)
        seen[f"{name} of {saved}", "next"] = _train(backend, STEPS)
        backend.close()
    return seen


def _train(backend: MegatronBackend, step: int) -> dict[str, float]:
    metrics = backend.train(shard_of(backend, [toy_samples(12, seed=step)], 2))
    return {name: metrics[name] for name in ("loss", "grad_norm", "ref_kl", "kl_coefficient", "sequences")}


def _followed(backend: MegatronBackend, alpha: float) -> Seen:
    """Metrics of each step, and the largest difference of the reference's weights from their formula in float64."""
    following = backend._per_rollout.reference

    def weights(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        from megatron.core.utils import unwrap_model

        return [parameter.detach().double() for module in modules for parameter in unwrap_model(module).parameters()]

    expected, steps, moved = weights(following.modules), [], []
    for step in range(STEPS):
        steps.append(_train(backend, step))
        if (step + 1) % INTERVAL == 0:
            policy = weights(backend._model.modules)
            expected = [alpha * one + (1 - alpha) * other for one, other in zip(policy, expected, strict=True)]
        found = weights(following.modules)
        moved.append(max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)))
    averages = [average.double() for average in following.averages.values()]
    return {
        "steps": steps,
        "differences": moved,
        "averages": [float((one - other).abs().max()) for one, other in zip(averages, expected, strict=False)],
    }


def _scored(backend: MegatronBackend) -> list[float]:
    """Log-probs by the reference, on every rank."""
    from miles_async.backends.megatron.distributed import from_last_stage
    from miles_async.backends.megatron.packing.pack import pack_sequences

    runner = backend._runner
    packed = pack_sequences([sequence for sequence in SEQUENCES if len(sequence) > 1], runner.layout, backend.device)
    found, _ = runner.reference.score([packed], runner.scorer.logprobs)
    return from_last_stage(found[0].tolist() if found else [], list[float])


# -------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """By rank, what was tried, and what was seen of it."""
    scratch = tmp_path_factory.mktemp("saved")
    models = {name: save_tiny(name, scratch / name) for name in ("qwen3-tied", "qwen3-moe")}
    return run_ranks(2, _observe, models, scratch)


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "copy", "moe"])
def test_the_reference_is_the_average_that_its_formula_gives(seen: list[Seen], name: str) -> None:
    for rank in seen:
        assert max(rank[name]["differences"]) <= (0.0 if name == "copy" else 1e-6)


def test_averages_of_weights_in_bfloat16_are_kept_in_fp32(seen: list[Seen]) -> None:
    """A share of a small change would be rounded away in bfloat16."""
    for rank in seen:
        assert len(rank["bf16"]["averages"]) > 0
        assert max(rank["bf16"]["averages"]) < 1e-7
        assert max(rank["bf16"]["differences"]) < 1e-2


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_layouts_agree_about_kl_and_coefficient(seen: list[Seen], name: str) -> None:
    expected = seen[0]["dp2"]["steps"]
    for rank in seen:
        for ours, theirs in zip(rank[name]["steps"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2, abs=1e-6)


def test_the_coefficient_follows_the_kl_of_the_step_before(seen: list[Seen]) -> None:
    for rank in seen:
        steps = rank["dp2"]["steps"]
        assert steps[0]["kl_coefficient"] == 0.3
        for before, after in itertools.pairwise(steps):
            error = min(max(before["ref_kl"] / 1e-4 - 1, -0.2), 0.2)
            assert after["kl_coefficient"] == pytest.approx(
                before["kl_coefficient"] * (1 + error * before["sequences"] / 100), rel=1e-6
            )
        assert len({step["kl_coefficient"] for step in steps}) > 2


@pytest.mark.parametrize("name", ["dp2", "tp2", "bf16", "moe"])
def test_a_resumed_run_has_the_same_reference_and_coefficient(seen: list[Seen], name: str) -> None:
    """Bitwise, and the next step follows in its turn."""
    for rank in seen:
        assert rank[f"{name} of {name}", "scored"] == rank[name, "scored"]
        assert rank[f"{name} of {name}", "next"] == rank[name, "next"]


@pytest.mark.parametrize(("name", "saved"), [("pp2", "dp2"), ("dp2", "pp2")])
def test_another_layout_loads_the_reference(seen: list[Seen], name: str, saved: str) -> None:
    for rank in seen:
        np.testing.assert_allclose(rank[f"{name} of {saved}", "scored"], rank[saved, "scored"], atol=1e-5)
        assert rank[f"{name} of {saved}", "next"]["kl_coefficient"] == rank[saved, "next"]["kl_coefficient"]
