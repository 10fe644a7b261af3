"""A plan from a run that was takes its flags and the durations that it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments.config_file import to_toml
from miles_async.arguments.parser import parse_arguments
from miles_async.commands.measured import measured
from miles_async.commands.plan import plan
from miles_async.errors import ConfigurationError
from miles_async.ledger.store import LedgerStore
from miles_async.staleness.events import Finished, Issued
from tests.property.builders import make_attempt, make_group


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two groups: 8 s and 4 s until the last of their samples; three steps with publications."""
    words = "--rollout-batch-size 2 --n-samples-per-prompt 2 --use-rollout-logprobs --max-weight-staleness 2".split()
    (tmp_path / "config.toml").write_text(to_toml(parse_arguments(words).arguments))
    store = LedgerStore(tmp_path / "ledger.sqlite")
    for number, seconds, lengths in ((0, 8.0, (40, 10)), (1, 4.0, (20, 20))):
        attempt = make_attempt(number)
        group = make_group(attempt, [(0,) * length for length in lengths])
        store.write([(100.0, Issued(attempt=attempt)), (100.0 + seconds, Finished(group=group))])
    store.close()
    rows = [
        {"step": step, "time/train_seconds": train, "publish/pause_seconds": pause, "publish/copy_seconds": 0.5}
        for step, (train, pause) in enumerate(((90.0, 9.0), (3.0, 1.0), (5.0, 2.0)))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_durations_of_its_parts(run_dir: Path) -> None:
    found = measured(run_dir)
    assert found.response.seconds == (8.0, 2.0, 4.0, 4.0), "within a group, by tokens"
    assert found.train.seconds == (3.0, 5.0), "the first step compiles"
    assert found.publish.seconds == (1.0, 2.0)
    assert found.copy_seconds == 0.5


def test_a_plan_takes_them_and_the_flags(run_dir: Path) -> None:
    short = ["--steps", "3", "--sweep", "max-weight-staleness=1,2"]
    text = plan(["--from", str(run_dir), *short])
    assert text.startswith(f"Measured in {run_dir}: 4 responses, median 4 s")
    assert "Recommended" in text
    assert "T_train 77," in plan(["--from", str(run_dir), "--train-seconds", "77", *short])


def test_what_is_no_run_is_told(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--from with --gpu"):
        plan(["--from", str(run_dir), "--gpu", "h100"])
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match="no step was trained"):
        measured(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="expected a run directory with ledger and metrics"):
        measured(run_dir)
