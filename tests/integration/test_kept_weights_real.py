"""Old log-probs by the weights that sampled each token: what is left of the ratio's other factor is engine and trainer.

# covers: C12
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from miles_async.arguments.algorithm import AlgorithmArguments, ProxLogpMethod
from miles_async.backends.megatron.backend import MegatronBackend
from tests.integration.megatron_scenario import Layout, make_backend, moving
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = (0, 1, 2)


@dataclass
class Observed:
    """Metrics of a step on tokens of all versions, by how π_old is computed; and what it did to the weights."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)  # tensors that differ after a step without a gradient


def sampled(backend: MegatronBackend, version: int) -> list[ToySample]:
    """Samples with the log-probs of an engine that agrees with the trainer's present weights to the last bit."""
    samples = toy_samples(6, seed=version)
    logprobs = backend.logprobs([sample.tokens.tolist() for sample in samples])
    return [
        dataclasses.replace(
            sample,
            rollout_logprobs=(np.r_[0.0, found] * sample.loss_mask).astype(np.float32),
            weight_versions=np.where(sample.loss_mask, version, -1).astype(np.int32),
        )
        for sample, found in zip(samples, logprobs, strict=True)
    ]


def observe(rank: int, world_size: int, store: dist.Store, directory: Path) -> Observed:
    observed = Observed()

    def run(name: str, method: ProxLogpMethod, most: int) -> None:
        algorithm = AlgorithmArguments(prox_logp_method=method, use_tis=True, tis_clip=100.0)
        place = dist.PrefixStore(name, store)
        backend = make_backend(rank, world_size, place, directory, Layout(), algorithm, kept_versions=most, lr=1e-2)

        def train(samples: list[ToySample], version: int) -> dict[str, float]:
            [shard] = to_shards([samples], dp_size=1, micro_batches=2)
            return backend.train(msgspec.structs.replace(shard, target_version=version))

        samples: list[ToySample] = []
        for version in VERSIONS:
            samples += sampled(backend, version)
            if version < VERSIONS[-1]:
                train(samples[-6:], version)
        idle = [dataclasses.replace(sample, advantage=0.0) for sample in samples]
        with moving(backend) as moved:
            train(idle, VERSIONS[-1])
        observed.moved += moved
        observed.metrics[name] = train(samples, VERSIONS[-1])
        backend.close()

    run("snapshots", "snapshots", 3)
    run("too few", "snapshots", 2)
    run("resumed", "snapshots", 1)
    run("recomputed", "recompute", 3)
    return observed


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    directory = save_tiny("qwen3-tied", tmp_path_factory.mktemp("model") / "qwen3-tied")
    [observed] = run_ranks(1, observe, directory, timeout=240)
    return observed


def test_the_weight_is_of_engine_and_trainer_and_the_ratio_of_staleness(seen: Observed) -> None:
    """The engine agrees with the trainer here, so that the weight is 1 whatever the age."""
    exact, recomputed = seen.metrics["snapshots"], seen.metrics["recomputed"]
    assert exact["tis_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert exact["tis_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert exact["ratio_max"] > 1.1
    assert exact["unkept_version_fraction"] == 0.0
    assert recomputed["tis_weight_max"] > 1.1
    assert recomputed["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_tokens_of_a_version_that_is_not_kept_are_counted(seen: Observed) -> None:
    few = seen.metrics["too few"]
    assert few["unkept_version_fraction"] == pytest.approx(1 / 3, abs=0.1)
    assert few["tis_weight_max"] > 1.05


def test_after_a_resume_the_present_weights_score_all_tokens(seen: Observed) -> None:
    """Checkpoints hold no kept weights: the first step has the present ones only, as without this method."""
    resumed, recomputed = seen.metrics["resumed"], seen.metrics["recomputed"]
    assert resumed["unkept_version_fraction"] == pytest.approx(2 / 3, abs=0.1)
    for metric in ("loss", "ratio_max", "tis_weight_mean", "tis_weight_max"):
        assert resumed[metric] == pytest.approx(recomputed[metric], rel=1e-5, abs=1e-6), metric


def test_scoring_with_kept_weights_leaves_the_model_as_it_was(seen: Observed) -> None:
    assert seen.moved == []
