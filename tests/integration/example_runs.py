"""Checks that all runs of the agent examples share, read from the run's summary, metrics and record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from miles_async.types import Sample
from miles_async.wiring.replay import Replay
from tests.integration.real_run import RealRun


def assert_turns_were_trained(run: RealRun, steps: int, *, most_turns: int) -> list[Sample]:
    """All steps were done, everything is accounted for, and what was trained are turns with observations between them.

    ``most_turns``: of a trajectory as the example means it; others may be longer. Returns all samples.
    """
    summary = run.summary
    assert summary["steps"] == len(run.steps) == steps
    assert summary["balanced"]
    assert summary["groups"]["trained"] == steps * 16
    assert summary["groups"]["quarantined"] == summary["groups"]["failed"] == 0
    assert summary["logprob_diff"]["max"] < 1e-4
    samples = [*trained_samples(run)]
    assert len(samples) == steps * 16 * 8
    for sample in samples:
        assert_observations_carry_no_loss(sample)
    assert {1, most_turns} <= {sample.metadata["turns"] for sample in samples}
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    return samples


def assert_observations_carry_no_loss(sample: Sample) -> None:
    """Only turns carry loss, each in one piece. A token is a character, or a mark of the template."""
    turns, messages = sample.metadata["turns"], sample.metadata["messages"]
    assert [message["role"] for message in messages].count("assistant") == turns
    mask = sample.loss_mask.tolist()
    assert not any(mask[: sample.prompt_length])
    assert mask[-1] == 1
    assert sum(now and not before for before, now in pairwise(mask)) == turns
    after = messages[[message["role"] for message in messages].index("assistant") :]
    observed = sum(1 + len(message["content"]) for message in after if message["role"] != "assistant") + turns - 1
    unsampled = mask[sample.prompt_length :].count(0)
    assert observed <= unsampled <= observed + turns  # the template ends turns that were cut


def assert_agent_agrees(samples: list[Sample]) -> None:
    """The turns that an agent says it took are those that the session server saw; one that had no room says nothing."""
    ended = [sample.metadata for sample in samples if sample.finish_reason == "stop"]
    assert [noted["agent_turns"] for noted in ended] == [noted["turns"] for noted in ended] != []


def trained_samples(run: RealRun) -> Iterator[Sample]:
    """Trained samples of a run with ``--record``, batch by batch; each batch is made again and compared."""
    for batch in Replay.of_run(run.run_dir):
        for group in batch.groups:
            yield from group.samples
