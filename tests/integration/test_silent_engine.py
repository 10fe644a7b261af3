"""One engine of two whose processes are stopped: the run goes on with the other, long before any deadline.

# covers: C10
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

RUN_SECONDS = 240.0
HISTORY_SECONDS = 30.0  # in which engines answer often enough to know how fast they are
FLAGS = (
    "--num-rollout",
    "100000",
    "--engine-max-restarts",
    "10",
    "--eval-prompt-data",
    "none",
    "--eval-interval",
    "none",
)


def test_steps_go_on_when_an_engine_or_its_detokenizer_stops(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    with real_run(tmp_path / "run", *FLAGS, command=imported_reverse) as run:
        run.wait_for_steps(2, RUN_SECONDS)
        time.sleep(HISTORY_SECONDS)
        first, second = run.engine_processes()
        stop(run, first)
        wait_for_log(run, "engine fenced")  # by the watch, or by a publication that begins before
        steps_go_on(run, engines_up=3)
        stop(run, detokenizer_of(second))
        wait_for_log(run, "engine fenced", 2)
        steps_go_on(run, engines_up=4)
        for engines_up in (5, 6):  # the same engine twice; SGLang itself ends it
            newest = run.engine_processes()[-1]
            detokenizer_of(newest).kill()
            steps_go_on(run, engines_up=engines_up)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(RUN_SECONDS) == 130, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]


def steps_go_on(run: RealRun, *, engines_up: int) -> None:
    wait_for_log(run, "engine is up", engines_up)
    run.wait_for_steps(len(run.steps) + 3, RUN_SECONDS)


def detokenizer_of(engine: psutil.Process) -> psutil.Process:
    [found] = [child for child in engine.children(recursive=True) if "detokenizer" in child.name()]
    return found


def stop(run: RealRun, process: psutil.Process) -> None:
    assert run.process.poll() is None, run.output
    process.send_signal(signal.SIGSTOP)


def wait_for_log(run: RealRun, text: str, times: int = 1) -> None:
    path = run.run_dir / "logs" / "rollout.log"
    deadline = time.monotonic() + RUN_SECONDS
    while path.read_text().count(text) < times:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, f"no {text!r}:\n{path.read_text()[-5000:]}"
        time.sleep(0.2)
