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

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RUN_SECONDS = 240.0
HISTORY_SECONDS = 30.0  # in which an engine answers often enough to know how fast it is
FLAGS = ("--num-rollout", "100000", "--eval-prompt-data", "none", "--eval-interval", "none")


def test_steps_go_on_when_an_engine_or_its_detokenizer_stops(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    with real_run(tmp_path / "run", *FLAGS, command=imported_reverse) as run:
        run.wait_for_steps(2, RUN_SECONDS)
        first, second = run.engine_processes()
        stop(run, first)
        wait_for_log(run, "engine fenced")  # by the watch, or by a publication that begins before
        wait_for_log(run, "engine is up", 3)
        run.wait_for_steps(len(run.steps) + 3, RUN_SECONDS)
        stop(run, detokenizer_of(second))
        wait_for_log(run, "generated nothing for longer than ever, while others did")
        wait_for_log(run, "engine is up", 4)
        run.wait_for_steps(len(run.steps) + 3, RUN_SECONDS)
        detokenizer_of(run.engine_processes()[0]).kill()
        wait_for_log(run, "engine is up", 5)  # SGLang itself ends the engine
        run.wait_for_steps(len(run.steps) + 3, RUN_SECONDS)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(RUN_SECONDS) == 130, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]


def detokenizer_of(engine: psutil.Process) -> psutil.Process:
    [found] = [child for child in engine.children(recursive=True) if "detokenizer" in child.name()]
    return found


def stop(run: RealRun, process: psutil.Process) -> None:
    time.sleep(HISTORY_SECONDS)
    assert run.process.poll() is None, run.output
    process.send_signal(signal.SIGSTOP)


def wait_for_log(run: RealRun, text: str, times: int = 1) -> None:
    path = run.run_dir / "logs" / "rollout.log"
    deadline = time.monotonic() + RUN_SECONDS
    while path.read_text().count(text) < times:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, f"no {text!r}:\n{path.read_text()[-5000:]}"
        time.sleep(0.2)
