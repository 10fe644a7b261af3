"""Log to Trackio as a run and its restart do, and print what its database then has. Its place is chosen at import."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.trackers import open_trackers
from miles_async.runtime.processes.restarts import RESTARTS_VARIABLE, RunRestart, restarts_variable


def main(folder: Path) -> dict[str, object]:
    arguments = ObservabilityArguments(run_dir=folder / "latest", use_trackio=True, trackio_project="mine")
    for step in (1, 2):
        trackers = open_trackers(arguments, {"optimizer": {"lr": 1e-6}})
        trackers.log({"reward/mean": step / 10, "train/loss": float("nan"), "age/count/0": 96}, step=step)
        trackers.log({"eval/gsm8k/pass@4": 0.5}, step=step)
        trackers.finish()
        aside = (folder / "latest").rename(folder / f"latest.{step}")
        restart = RunRestart(at=0.0, reason="a node was lost", run_dir=str(aside), checkpoint=None)
        os.environ |= restarts_variable([restart])
    del os.environ[RESTARTS_VARIABLE]
    trackers = open_trackers(arguments, {})  # another run, in the same second
    trackers.log({"reward/mean": 0.9}, step=1)
    trackers.finish()

    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records("mine")
    logs = [SQLiteStorage.get_logs("mine", run_id=str(run["id"])) for run in runs]
    points = [(row["step"], row["reward/mean"]) for row in logs[0] if "reward/mean" in row]
    evaluations = [(row["step"], row["eval/gsm8k/pass@4"]) for row in logs[0] if "eval/gsm8k/pass@4" in row]
    config = SQLiteStorage.get_run_config("mine", run_id=str(runs[0]["id"])) or {}
    names = [run["name"] for run in runs]
    return {"names": names, "points": points, "evaluations": evaluations, "lr": config.get("lr")}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
