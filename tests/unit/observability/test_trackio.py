"""Trackio's own database has what was logged, after a restart, too; one that cannot be used costs a run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.extras import needs
from tests.json_dict import JsonDict

pytestmark = needs("trackio")

ROOT = Path(__file__).parents[3]
UNUSABLE = """
import sys
from pathlib import Path
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.trackers import open_trackers

trackers = open_trackers(ObservabilityArguments(run_dir=Path(sys.argv[1]), use_trackio=True), {})
trackers.log({"reward/mean": 0.5}, step=1)
trackers.finish()
"""


def run(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_restarted_run_continues_and_another_is_apart(tmp_path: Path) -> None:
    shown = run(
        "-m",
        "tests.unit.observability.trackio_run",
        str(tmp_path),
        TRACKIO_DIR=str(tmp_path / "db"),
        HF_HUB_OFFLINE="1",
    )
    found: JsonDict = json.loads(shown.splitlines()[-1])
    first, second = found["names"]
    assert first != second
    assert found["points"] == [[1, 0.1], [2, 0.2]]
    assert found["evaluations"] == [[1, 0.5], [2, 0.5]]
    assert found["lr"] == "1e-06"


def test_a_place_that_cannot_be_used_costs_a_run_nothing(tmp_path: Path) -> None:
    # covers: M12
    (tmp_path / "file").touch()
    run("-c", UNUSABLE, str(tmp_path / "run"), TRACKIO_DIR=str(tmp_path / "file"))
    assert '"reward/mean": 0.5' in (tmp_path / "run" / "metrics.jsonl").read_text()
