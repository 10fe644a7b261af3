"""Stale groups under each ``--stale-group-action``, with everything real.

The overtaken are always the same attempts (``stragglers``), so each test knows whose story to expect.

# covers: C1, C2, C3, C5
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.commands.ledger import explain, ledger
from miles_async.ledger.reader import AttemptRecord, open_ledger
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.staleness.ledger import Outcome, Stage
from miles_async.wiring.replay import Replay
from tests.integration.real_run import RealRun, real_run
from tests.integration.stragglers import STRAGGLERS
from tests.integration.trained_prompts import attempts, source_order

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(420)]

RUN_SECONDS = 300.0
NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 8, 4, 4
NUM_GROUPS = NUM_STEPS * BATCH_SIZE
FLAGS = (
    *("--num-rollout", str(NUM_STEPS), "--rollout-batch-size", str(BATCH_SIZE), "--max-rollout-lead", "2"),
    *("--n-samples-per-prompt", str(GROUP_SIZE), "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    *("--eval-prompt-data", "none", "--eval-interval", "none"),
)


def test_recycle_gives_the_prompt_another_attempt(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    # covers: C11
    recycle = ("--max-weight-staleness", "1", "--stale-group-action", "recycle")
    run, rows = _finished(tmp_path, imported_reverse, "Overtaken", *recycle, "--record")
    assert len(list(Replay.of_run(run.run_dir))) == NUM_STEPS
    assert run.summary["age_max"] <= 1
    assert run.summary["groups"]["dropped"] == 0
    assert _trained_prompts(rows) == sorted(source_order(NUM_GROUPS))  # each exactly once
    for row in _stale(rows, Outcome.STALE_RECYCLED):
        again = next(later for later in rows if later.prompt_id == row.prompt_id and later.attempt_id > row.attempt_id)
        assert again.history == (*row.history, f"stale: {row.reason}")
        story = explain([str(run.run_dir), str(row.attempt_id)])
        assert f"recycled: {_told(row)}" in story
        assert f"the prompt came again as attempt {again.attempt_id}" in story


def test_drop_lets_a_fresh_prompt_take_its_place(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    run, rows = _finished(
        tmp_path, imported_reverse, "Overtaken", "--max-weight-staleness", "1", "--stale-group-action", "drop"
    )
    assert run.summary["age_max"] <= 1
    assert run.summary["groups"]["recycled"] == 0
    dropped = _stale(rows, Outcome.STALE_DROPPED)
    assert sorted([*_trained_prompts(rows), *(row.prompt_id for row in dropped)]) == sorted(source_order(len(rows)))
    for row in dropped:
        story = explain([str(run.run_dir), row.prompt_id])
        assert f"dropped: {_told(row)}" in story
        assert "came again" not in story


def test_without_a_bound_they_are_trained_however_old(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    run, rows = _finished(tmp_path, imported_reverse, "Overtaken", "--max-weight-staleness", "none")
    assert run.summary["age_max"] >= 2
    assert run.summary["groups"]["recycled"] == run.summary["groups"]["dropped"] == 0
    assert _trained_prompts(rows) == sorted(source_order(NUM_GROUPS))
    for row in _of_stragglers(rows):
        assert f"(age {_age(row)})" in explain([str(run.run_dir), str(row.attempt_id)])
        assert _age(row) >= 2


def test_wait_holds_publications_back_until_they_are_trained(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    run, rows = _finished(
        tmp_path, imported_reverse, "Late", "--max-weight-staleness", "1", "--stale-group-action", "wait"
    )
    assert run.summary["age_max"] == 1
    assert run.summary["groups"]["recycled"] == run.summary["groups"]["dropped"] == 0
    assert _trained_prompts(rows) == sorted(source_order(NUM_GROUPS))
    versions = [step["weight_version/trainer"] for step in run.steps]
    assert versions == sorted(versions)
    assert len(set(versions)) < NUM_STEPS  # some steps stepped from the same version as the one before
    held_up_by = [row for row in _of_stragglers(rows) if row.issued_version == 0]
    assert held_up_by
    assert all(_age(row) == 1 for row in held_up_by)


def test_what_engines_are_too_slow_for_is_aborted_there_and_replayed(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    # covers: C11
    uneven = ("--rollout-temperature", "2.5", "--rollout-max-response-len", "100")  # most end soon, some never do
    run, rows = _finished(
        tmp_path, imported_reverse, None, *uneven, "--max-weight-staleness", "1", "--num-rollout", "16", "--record"
    )
    aborted = [row for row in rows if row.stage is Stage.IN_FLIGHT]
    assert aborted
    assert all((row.target_version or 0) >= row.issued_version + 2 for row in aborted)
    assert run.summary["age_max"] == 1
    assert len(list(Replay.of_run(run.run_dir))) == 16


def _finished(
    tmp_path: Path, command: tuple[str, ...], stragglers: str | None, *flags: str
) -> tuple[RealRun, list[AttemptRecord]]:
    """A run to its end, and its ledger, which balances and agrees with what the run says of itself."""
    hook = ("--custom-generate-function-path", f"tests.integration.stragglers:{stragglers}") if stragglers else ()
    with real_run(tmp_path / "run", *FLAGS, *flags, *hook, command=command) as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    summary, rows = run.summary, attempts(run.run_dir)
    with open_ledger(run.run_dir / LEDGER_FILE) as reader:
        assert reader.balance().summary() == summary["groups"]
    assert "balanced: issued = " in ledger([str(run.run_dir)])
    assert summary["groups"]["issued"] == len(rows)
    assert summary["groups"]["trained"] == summary["steps"] * BATCH_SIZE == len(_trained_prompts(rows))
    assert summary["groups"]["in_flight"] == summary["groups"]["buffered"] == summary["groups"]["cut"] == 0
    assert sum(summary["age_histogram"].values()) == summary["steps"] * BATCH_SIZE * GROUP_SIZE
    for name in ("recycled", "dropped", "failed", "filtered", "quarantined"):
        assert sum(step[f"groups/{name}"] for step in run.steps) == summary["groups"][name]
    aborted = [row for row in rows if row.stage is Stage.IN_FLIGHT and row.outcome is not Outcome.CANCELLED]
    assert sum(step["groups/aborted"] for step in run.steps) == len(aborted)
    for step in run.steps:
        batch = [row for row in rows if row.step == step["step"]]
        assert len(batch) == BATCH_SIZE
        assert max(map(_age, batch)) == step["age/max"] <= summary["age_max"]
        assert {row.target_version for row in batch} == {step["weight_version/trainer"]}
    return run, rows


def _of_stragglers(rows: list[AttemptRecord]) -> list[AttemptRecord]:
    return [row for row in rows if row.attempt_id in STRAGGLERS]


def _stale(rows: list[AttemptRecord], outcome: Outcome) -> list[AttemptRecord]:
    """All with that outcome: the stragglers, and whom they may have held up. Each is too old, and says how old."""
    stale = [row for row in rows if row.outcome is outcome]
    assert {row.attempt_id for row in stale} >= set(STRAGGLERS)
    for row in stale:
        assert row.step is None
        if row.stage is Stage.BUFFERED:
            assert row.reason == f"age {_age(row)}"
            assert _age(row) > 1
        else:
            assert row.target_version is not None
            assert row.reason == f"aborted at age {row.target_version - row.issued_version}"
    # The straggler itself is of unknown age; the others of its group are finished, and too old without it.
    assert {row.stage for row in _of_stragglers(stale)} == {Stage.IN_FLIGHT}
    return stale


def _told(row: AttemptRecord) -> str:
    if row.stage is Stage.IN_FLIGHT:
        return f"{row.reason} while it was generated, too old for version {row.target_version}"
    return f"{row.reason} at the cut for version {row.target_version}"


def _trained_prompts(rows: list[AttemptRecord]) -> list[str]:
    return sorted(row.prompt_id for row in rows if row.outcome is Outcome.TRAINED)


def _age(row: AttemptRecord) -> int:
    """Age of its oldest token at the cut."""
    assert row.target_version is not None, row
    assert row.oldest_version is not None, row
    return row.target_version - row.oldest_version
