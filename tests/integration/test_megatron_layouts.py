"""MegatronBackend against transformers and plain PyTorch: every family of models, every layout of ranks on CPU.

One set of processes per layout observes all cases that were selected; the tests below only compare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from miles_async.backends.megatron.families.hf_config import read_config
from miles_async.types import TokenScores
from tests.integration.family_table import COMPARED, DEEPER, EVERY_DAY
from tests.integration.megatron_scenario import (
    CORRECTED,
    LR,
    PER_TOKEN,
    PLAIN,
    SEQUENCES,
    Case,
    Layout,
    Observed,
    Training,
    observe_training,
    rollout_steps,
)
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.selection import selected
from tests.integration.tiny_models import FAMILIES, model_type, save_tiny
from tests.integration.toy_batches import ToySample

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SHARED = {"share_prefixes": True}
LAYOUTS = {
    "one-rank": Layout(),
    "one-rank-3-micro-batches": Layout(micro_batches=3),
    "dp2": Layout(world_size=2),
    "dp2-overlap": Layout(
        world_size=2,
        micro_batches=3,
        model={"megatron_extra": ("--overlap-grad-reduce", "--overlap-param-gather", "--bucket-size", "512")},
    ),
    "one-rank-recompute-block": Layout(
        model={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    ),
    "one-rank-shared-prefixes": Layout(model=SHARED),
    "tp2-shared-prefixes": Layout(world_size=2, tensor=2, model=SHARED),
    "pp2-shared-prefixes": Layout(world_size=2, pipeline=2, model={**SHARED, "recompute_granularity": "full"}),
    "tp2-sequence-parallel": Layout(world_size=2, tensor=2),
    "tp2": Layout(world_size=2, tensor=2, sequence_parallel=False, micro_batches=2),
    "tp4": Layout(world_size=4, tensor=4),
    "pp2": Layout(world_size=2, pipeline=2, micro_batches=2),
    "pp2-unequal": Layout(world_size=2, pipeline=2, first_stage_layers=2, micro_batches=2),
    "pp2-unequal-cp2": Layout(world_size=4, pipeline=2, context=2, first_stage_layers=2),
    "pp2-virtual2": Layout(world_size=2, pipeline=2, virtual=2, micro_batches=3),
    "tp2-pp2-virtual2": Layout(world_size=4, tensor=2, pipeline=2, virtual=2, micro_batches=2),
    "dp2-pp2-virtual2": Layout(world_size=4, pipeline=2, virtual=2),
    "cp2": Layout(world_size=2, context=2, micro_batches=2),
    "tp2-cp2": Layout(world_size=4, tensor=2, context=2),
    "pp2-cp2": Layout(world_size=4, pipeline=2, context=2, micro_batches=2),
    "pp2-virtual2-cp2": Layout(world_size=4, pipeline=2, virtual=2, context=2, micro_batches=2),
    "dp2-cp2": Layout(world_size=4, context=2),
    "cp4": Layout(world_size=4, context=4),
    "cp2-ep2": Layout(world_size=4, context=2, expert=2),
    "ep2": Layout(world_size=2, expert=2, micro_batches=2),
    "pp2-ep2": Layout(world_size=4, pipeline=2, expert=2, micro_batches=2),
    "etp2": Layout(world_size=2, expert_tensor=2),
    "tp2-etp1": Layout(world_size=2, tensor=2, expert_tensor=1),
    "ep2-etp2": Layout(world_size=4, expert=2, expert_tensor=2),
    "tp2-ep2": Layout(world_size=2, tensor=2, expert=2, expert_tensor=1),
    "tp2-ep2-etp2": Layout(world_size=4, tensor=2, expert=2, expert_tensor=2, micro_batches=2),
}
ALGORITHMS = {"qwen3": CORRECTED, "qwen3-moe": CORRECTED, "qwen3-tied": PER_TOKEN}
CASES = [
    pytest.param((layout, model), id=f"{layout}/{model}", marks=marks)
    for layout, models in COMPARED.items()
    for model in models
    for marks in [() if model in EVERY_DAY.get(layout, ()) else (pytest.mark.long,)]
]

Ranks = list[Observed]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    root = tmp_path_factory.mktemp("models")
    directories = {name: save_tiny(name, root / name) for name in FAMILIES}
    directories |= {
        name: save_tiny(family, root / name, num_hidden_layers=layers) for name, (family, layers) in DEEPER.items()
    }
    for name in FAMILIES:
        assert read_config(directories[name])["model_type"] == model_type(name)
    return {
        name: Training(
            directory,
            algorithm=ALGORITHMS.get(name, PLAIN),
            optimizer_steps=2 if name in ("qwen3", "qwen3-tied") else 1,
            epochs=2 if name == "qwen3-moe" else 1,
        )
        for name, directory in directories.items()
    }


@pytest.fixture(scope="module")
def seen(models: dict[str, Training], request: pytest.FixtureRequest) -> Callable[[Case], Ranks]:
    """Observations of each rank in a case; the first case of a layout observes all of them that were selected."""
    chosen: list[Case] = selected(request, "case")

    @functools.cache
    def observed(cases: tuple[Case, ...]) -> list[dict[Case, Observed | str]] | Exception:
        name = cases[0][0]
        world_size = LAYOUTS[name].world_size
        try:
            return run_ranks(world_size, observe_training, models, {name: LAYOUTS[name]}, cases, timeout=300)
        except (RuntimeError, TimeoutError) as error:  # kept, too: each case would wait for it again
            return error

    def of_case(case: Case) -> Ranks:
        of_layout = tuple(other for other in chosen if other[0] == case[0])
        found = observed(of_layout if case in of_layout else (case,))
        if isinstance(found, Exception):
            raise found
        ranks = [rank[case] for rank in found]
        failed = [rank for rank in ranks if isinstance(rank, str)]
        assert not failed, failed[0]
        return [rank for rank in ranks if not isinstance(rank, str)]

    return of_case


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def ranks(seen: Callable[[Case], Ranks], case: Case) -> Ranks:
    return seen(case)


@pytest.fixture(scope="module")
def plain_of(models: dict[str, Training]) -> Callable[[str], Observed]:
    """The same, by transformers and torch alone."""
    return functools.cache(lambda name: _plain(models[name]))


@pytest.fixture
def plain(plain_of: Callable[[str], Observed], case: Case) -> Observed:
    return plain_of(case[1])


def test_logprobs_of_packed_sequences_equal_transformers(ranks: Ranks, plain: Observed) -> None:
    for rank in ranks:
        _assert_close(rank.logprobs, plain.logprobs, 1e-5)


def test_packing_does_not_change_logprobs(ranks: Ranks) -> None:
    for rank in ranks:
        _assert_close(rank.logprobs, rank.logprobs_alone, 1e-6)


def test_export_is_bitwise_what_was_loaded(ranks: Ranks) -> None:
    """Names, dtypes and values, on every rank."""
    for rank in ranks:
        assert rank.export_differs == []


def test_losses_and_gradient_norms_equal_plain_pytorch(
    ranks: Ranks, plain: Observed, case: Case, models: dict[str, Training]
) -> None:
    """Three rollout steps: the clip, TIS, KL in the loss and in the reward, entropy, the means over tokens and over
    sequences of all ranks, AdamW and clipping are all in these numbers, and log-probs of before the first of several
    optimizer steps or epochs.
    """
    in_reward = models[case[1]].algorithm == PER_TOKEN
    rounding = 4e-6 * PER_TOKEN.kl_coef if in_reward else 1e-6  # the coefficient multiplies that of the log-probs
    for rank in ranks:
        for ours, reference in zip(rank.steps, plain.steps, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=rounding)
            assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
            assert ours["loss_tokens"] == reference["loss_tokens"]


def test_scores_of_shown_samples_are_those_of_the_model_before_the_step(
    ranks: Ranks, plain: Observed, case: Case, models: dict[str, Training]
) -> None:
    """Each sample by one rank; entropies of the first optimizer step, where the algorithm computes them."""
    scores = sorted((each for rank in ranks for each in rank.scores), key=lambda each: each.branch)
    samples = [sample for step in rollout_steps(models[case[1]].optimizer_steps)[0] for sample in step]
    assert [each.branch for each in scores] == [*range(len(samples))]
    for found, expected, sample in zip(scores, plain.scores, samples, strict=True):
        assert found.logprobs is not None
        assert expected.logprobs is not None
        np.testing.assert_allclose(found.logprobs, expected.logprobs * sample.loss_mask, rtol=0, atol=1e-5)
        if models[case[1]].algorithm != CORRECTED:
            assert found.entropies is None
        elif found.branch < len(samples) // models[case[1]].optimizer_steps:
            assert expected.entropies is not None
            assert found.entropies == pytest.approx(expected.entropies * sample.loss_mask, abs=1e-5)


def test_trained_model_equals_plain_pytorch(ranks: Ranks, plain: Observed) -> None:
    for rank in ranks:
        _assert_close(rank.logprobs_after, plain.logprobs_after, 5e-3)


def test_a_step_without_gradient_leaves_the_weights_alone(
    ranks: Ranks, case: Case, models: dict[str, Training]
) -> None:
    """All advantages are 0: Adam's momentum must not move anything, on any rank. A KL in loss or reward may."""
    regularized = models[case[1]].algorithm in (CORRECTED, PER_TOKEN)
    for rank in ranks:
        assert bool(rank.moved) is regularized
        assert rank.without_advantages["skipped_optimizer_steps"] == (0 if regularized else 1)
        assert (rank.without_advantages["grad_norm"] > 0) is regularized
        assert rank.without_advantages["loss_tokens"] > 0  # they are counted, and compared with the engines


def test_every_rank_reports_the_same_metrics(ranks: Ranks) -> None:
    for rank in ranks[1:]:
        for ours, first in zip(rank.steps, ranks[0].steps, strict=True):
            assert _without_time(ours) == pytest.approx(_without_time(first))


def test_step_metrics(seen: Callable[[Case], Ranks]) -> None:  # covers: M3, O5
    first = seen(("one-rank", "qwen3"))[0].steps[0]
    assert first["optimizer_steps"] == 2
    assert first["skipped_optimizer_steps"] == 0
    assert 0 < first["optimizer_lag_mean"] < first["optimizer_lag_max"] == 1
    assert first["lr"] == LR
    assert 0 < first["entropy"] <= np.log(64)  # the algorithm of this model asks for it
    assert "entropy" not in seen(("one-rank", "llama"))[0].steps[0]
    assert 0 < first["logprob_diff_mean"] <= first["logprob_diff_max"]
    assert 0 < first["logprob_diff_tokens"] < first["loss_tokens"]  # every second sample is one version old
    assert first["rollout_kl_k3"] > 0
    assert 0 < first["tis_weight_mean"] <= first["tis_weight_max"] <= 2.0
    assert first["ref_kl"] >= 0


def _plain(training: Training) -> Observed:
    corrected, per_token = training.algorithm == CORRECTED, training.algorithm == PER_TOKEN
    trainer = PlainTrainer(
        training.directory,
        lr=LR,
        tis=corrected,
        kl=0.3 if corrected else None,
        entropy=(0.1, 0.4) if corrected else (0.0, 0.0),
        reward_kl=5.0 if per_token else None,
        sequence_mean=per_token,
    )

    def logprobs() -> list[list[float]]:
        with torch.no_grad():
            return [trainer.logprobs(sequence).tolist() if len(sequence) > 1 else [] for sequence in SEQUENCES]

    before = logprobs()
    samples = [sample for step in rollout_steps(training.optimizer_steps)[0] for sample in step]
    scores = [_plain_scores(trainer, branch, sample) for branch, sample in enumerate(samples)]
    steps = [trainer.train(samples * training.epochs) for samples in rollout_steps(training.optimizer_steps)]
    return Observed(before, [], [], steps, scores, logprobs())


def _plain_scores(trainer: PlainTrainer, branch: int, sample: ToySample) -> TokenScores:
    with torch.no_grad():
        logits = trainer.model(torch.tensor(sample.tokens)[None].long()).logits[0, :-1]
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        logprobs = trainer.logprobs(sample.tokens)
    return TokenScores(branch=branch, logprobs=np.append([0], logprobs), entropies=np.append([0], entropies))


def _assert_close(ours: list[list[float]], reference: list[list[float]], tolerance: float) -> None:
    assert [len(row) for row in ours] == [len(row) for row in reference]
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(reference), rtol=0, atol=tolerance)


def _without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key != "step_seconds"}
