"""``miles-async status``: what the files of a run directory say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.cli import main
from miles_async.ledger.store import LedgerStore
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.staleness.events import Changed, Ended, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.types import Changes
from tests.property.builders import make_attempt
from tests.unit.commands.command_line import printed, refused
from tests.unit.commands.run_directories import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two of 40 steps are trained, an evaluation and a checkpoint were made, and two groups filtered."""
    run_dir = write_run(tmp_path / "run", arguments=Arguments(rollout=RolloutArguments(num_rollout=40)))
    file = MetricsFile(run_dir / FILE_NAME)
    file.log({"eval/reward": 0.25}, step=2)
    file.log({"checkpoint/write_seconds": 1.5}, step=2)
    file.finish()
    store = LedgerStore(run_dir / "ledger.sqlite")
    store.write([(1.0, Issued(attempt=make_attempt(number))) for number in (1, 2, 3)])
    ends = [(2.0, Ended(attempt_id=n, outcome=Outcome.FILTERED, reason="zero_std")) for n in (1, 2)]
    store.write(ends)
    changed = Changes(after=2, before={"lr": 5e-4, "evaluation": None}, values={"lr": 4e-4, "evaluation": "now"})
    store.write([(3.0, Changed(changed))])
    store.close()
    warnings = [
        {"level": "warning", "timestamp": "2026-11-25T14:00:02Z", "event": "engine is restarted", "engine": "engine-1"},
        {"level": "info", "timestamp": "2026-11-25T14:00:03Z", "event": "engines repaired"},
    ]
    (run_dir / "logs" / "driver.log").write_text("".join(json.dumps(each) + "\n" for each in warnings) + '{"lev')
    (run_dir / "logs" / "rollout.log").write_text(
        json.dumps({"level": "warning", "timestamp": "2026-11-25T14:00:01Z", "event": "attempt failed"}) + "\n"
    )
    return run_dir


def test_a_run_that_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip() for line in printed(capsys, "status", str(run_dir)).splitlines()]
    assert lines[0] == f"{run_dir}: running"
    assert "step 2/40  reward 0.500 (avg 0.300)  age 0.50 (max 1)" in lines[2]
    assert lines[3].startswith("last metrics 0:0")
    assert lines[4:] == [
        "evaluation after 2 steps: mean reward 0.250",
        "last checkpoint: step 2",
        "1 group in flight, 0 buffered, 2 of 2 finished ones filtered (mostly: zero_std); "
        "the trainer waits for groups in flight",
        "set after step 2: lr 0.0005 → 0.0004",
        "set after step 2: evaluation now",
        "warning at 2026-11-25T14:00:01Z: attempt failed",
        "warning at 2026-11-25T14:00:02Z: engine is restarted engine=engine-1",
    ]


@pytest.mark.parametrize("line", ["7", "[" * 100_000, '"a text"', "\x00"], ids=range(4))
def test_lines_of_logs_that_are_no_entries_are_passed_over(
    run_dir: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    for path in (run_dir / "logs" / "driver.log", run_dir / "summary.json"):
        path.write_text(line + "\n")
    assert printed(capsys, "status", str(run_dir)).count("warning at") == 1


def test_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "status", "--json", str(run_dir)))
    assert (found["state"], found["steps"], found["metrics"]["step"], found["checkpoint"]) == ("running", 40, 2, 2)
    assert found["groups"]["filtered"] == 2
    assert found["changes"] == ["after step 2: lr 0.0005 → 0.0004", "after step 2: evaluation now"]
    assert [entry["side"] for entry in found["warnings"]] == ["rollout", "driver"]


def test_a_run_that_is_over_and_one_on_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", str(write_run(tmp_path / "killed", alive=False))])
    main(["status", str(write_run(tmp_path / "far", host="elsewhere"))])
    finished = write_run(tmp_path / "finished", host="elsewhere")
    (finished / "summary.json").write_text(json.dumps({"ending": "failed", "error": "rank 0 died"}))
    main(["status", str(finished)])
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'killed'}: over, killed, or lost with its machine\n" in shown
    assert f"{tmp_path / 'far'}: unknown from here: ask on elsewhere\n" in shown
    assert f"{finished}: over, failed\n" in shown
    assert [line.count("  ETA ") for line in shown.splitlines() if "  step 2" in line] == [0, 1, 0]
    assert "error: rank 0 died\n" in shown


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", rewards=())
    (run_dir / FILE_NAME).unlink()
    assert "\n  no step yet\n" in printed(capsys, "status", str(run_dir))


def test_what_is_no_run_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "quickstart")
    (tmp_path / "other").mkdir()
    for words, message in [
        ([str(tmp_path / "quickstat")], f"did you mean {tmp_path / 'quickstart'}?"),
        ([str(tmp_path / "other")], f"expected a run directory with a run.json, found none in {tmp_path / 'other'}"),
        ([], "the following arguments are required: RUN_DIR"),
    ]:
        [line] = refused(capsys, "status", *words).splitlines()
        assert message in line


def test_the_parent_of_runs_is_told_from_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"pid')
    assert f"found none in {tmp_path}; it holds the runs a, b: name one" in refused(capsys, "status", str(tmp_path))
    assert "run.json cannot be read: " in refused(capsys, "status", str(tmp_path / "a"))
