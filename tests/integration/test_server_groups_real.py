"""A run with engines for training, for evaluation and a frozen one, which grows and shrinks on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from miles_async.commands.scale import scale
from miles_async.runtime.network.addresses import LOOPBACK
from miles_async.runtime.network.ports import HeldPort
from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

SECONDS = 400.0  # for three engines and a few steps, on a busy machine
FLEET = """
[groups.train]
engines = 1
[groups.eval]
role = "evaluation"
[groups.judge]
role = "frozen"
port = {port}
"""


def fleet_of(run: RealRun, *words: str) -> str:
    """Return what ``miles-async scale`` prints, without a process for every question."""
    return scale([str(run.run_dir), *words])


def until(run: RealRun, *states: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(state in fleet_of(run) for state in states):
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, (states, fleet_of(run))
        time.sleep(0.5)


def ask(port: int, key: str) -> str:
    body = {"model": "judge", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["choices"][0]["finish_reason"]


def test_groups_of_engines_that_grow_and_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported_reverse: tuple[str, ...]
) -> None:
    # covers: C8, R4
    monkeypatch.setenv("MILES_ASYNC_API_KEY", "chosen")
    with HeldPort(LOOPBACK) as held:
        port = held.number
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.format(port=port))
    flags = ("--server-groups", str(fleet), "--num-rollout", "1000", "--eval-interval", "2")
    flags += ("--actor-num-gpus-per-node", "1", "--save-hf", "none")
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        run.wait_for_steps(1, SECONDS)
        assert "train-0 serving" in fleet_of(run)
        assert "judge-0 serving" in fleet_of(run)
        assert ask(port, "chosen") in ("stop", "length")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, "guessed")
        assert "train-1 starting" in fleet_of(run, "train", "2")
        until(run, "train-0 serving", "train-1 serving")
        steps = len(run.steps)
        run.wait_for_steps(steps + 2, SECONDS)
        command = [sys.executable, "-m", "miles_async", "scale", str(run.run_dir), "train", "1"]
        subprocess.run(command, timeout=60, check=True)
        until(run, "train-0 serving; ")
        steps = len(run.steps)
        run.wait_for_steps(steps + 2, SECONDS)
        command = [sys.executable, "-m", "miles_async", "stop", str(run.run_dir)]
        subprocess.run(command, timeout=120, check=True)
        assert run.wait(60) == 130, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["logprob_diff"]["max"] < 1e-4
    assert run.steps[-1]["router/requests"] > run.steps[0]["router/requests"]  # read every few seconds
    log = [json.loads(line) for line in (run.run_dir / "logs" / "rollout.log").read_text().splitlines()]
    # On a busy machine an engine may answer a question late; one that is given up is fenced, which is another warning.
    warnings = [each for each in log if each["level"] != "info" and each["event"] != "engine does not answer"]
    assert not warnings, "somebody was lost, or something tried again"
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval/reward" in record]
    assert len(evaluations) >= 2
    for record in evaluations:  # each from exactly the version that was visible when it began
        versions = {value for name, value in record.items() if "weight_version" in name}
        assert versions == {record["step"]}, record
