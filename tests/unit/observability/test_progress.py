"""Progress: what a step shows, on a terminal and in a log file."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from miles_async.observability.progress import LiveProgress, Progress, open_progress
from miles_async.observability.progress_state import MISSING, ProgressState, duration, sparkline

METRICS = {
    "reward/mean": 0.5,
    "age/mean": 0.75,
    "age/max": 2.0,
    "rollout/lead": 34.0,
    "rollout/in_flight": 18.0,
    "rollout/buffered": 16.0,
    "time/step_seconds": 4.0,
    "time/wait_seconds": 1.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_progress_is_one_line_per_phase_and_step_with_lead_and_age() -> None:
    # covers: P9
    clock, lines = Clock(), []
    progress = Progress(ProgressState(40, clock=clock), lines.append)
    with progress:
        progress.phase("Ray")
        clock.now += 4
        progress.phase("engines")
        clock.now += 25.5
        progress.step(1, METRICS)
        progress.evaluation(1, {"eval/reward": 0.25})
    assert lines == [
        "starting Ray ...",
        "Ray ready after 4.0 s",
        "starting engines ...",
        "engines ready after 25.5 s",
        "step 1/40  reward 0.500 (avg 0.500)  age 0.75 (max 2)  lead 34  in flight 18  buffered 16  "
        "trainer idle 25%  4.00 s  ETA 2:36",
        "evaluation after 1 steps: mean reward 0.250",
    ]


def test_a_run_outlives_the_reader_of_its_lines() -> None:
    source = "from miles_async.observability.progress import open_progress\nprogress = open_progress(1)\n"
    source += "for name in ('engines', 'trainer', 'rollout') * 9999:\n    progress.phase(name)\nraise SystemExit(7)"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"starting engines ...\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 7


def test_a_run_outlives_its_terminal() -> None:
    """As after ``miles-async train ... & disown`` and a logout."""
    source = """
import os, pty, sys, time
reader, terminal = pty.openpty()
os.dup2(terminal, 1)
os.close(terminal)
from miles_async.observability.progress import LiveProgress, open_progress
with open_progress(9) as progress:
    assert isinstance(progress, LiveProgress)
    progress.phase("engines")
    os.close(reader)
    for step in (1, 2, 3):
        progress.step(step, {"reward/mean": 0.5})
        progress.evaluation(step, {"eval/reward": 0.5})
        time.sleep(0.3)  # a redraw, in its thread
print("to nobody", flush=True)
raise SystemExit(7)
"""
    process = subprocess.run([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (7, "")


def test_metrics_that_are_absent_or_not_a_number_show_as_a_dash() -> None:
    view = ProgressState(10).add_step(1, {"reward/mean": float("nan")})
    assert (view.reward, view.reward_average, view.lead, view.eta) == (MISSING,) * 4


def test_reward_average_is_over_the_last_five_steps_and_idle_over_the_run() -> None:
    state = ProgressState(10)
    for step in range(1, 8):
        reward, waited = (step - 1) / 10, 4.0 * (step == 1)
        view = state.add_step(step, {**METRICS, "reward/mean": reward, "time/wait_seconds": waited})
    assert view.reward_average == "0.400"
    assert view.trainer_idle == "14%"


def test_live_display_draws_and_leaves_the_terminal_as_it_was_after_an_interrupt() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    progress = LiveProgress(ProgressState(40), console)
    with pytest.raises(KeyboardInterrupt), progress:  # noqa: PT012 (the block is what is interrupted)
        progress.phase("engines")
        progress.step(1, METRICS)
        progress.evaluation(0, {"eval/reward": 0.25})
        raise KeyboardInterrupt
    progress.close()  # twice is once
    text = output.getvalue()
    for expected in ("✓", "engines", "1/40", "34 groups", "0.75 (max 2)", "mean reward 0.250"):
        assert expected in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_display_follows_the_console_and_the_flag() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(open_progress(1, console=terminal), LiveProgress)
    assert type(open_progress(1, live=False, console=terminal)) is Progress
    assert type(open_progress(1, console=Console(file=io.StringIO()))) is Progress


def test_sparkline_is_scaled_to_zero_and_one_at_least() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-3.0, 5.0]) == "▁█"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (7500, "2:05:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_step_says_how_many_groups_were_filtered_since_the_last_one() -> None:
    lines: list[str] = []
    progress = Progress(ProgressState(2), lines.append)
    progress.step(1, {**METRICS, "groups/filtered": 12.0})
    progress.step(2, {**METRICS, "groups/filtered": 0.0})
    assert "buffered 16  filtered 12  trainer idle" in lines[0]
    assert "filtered" not in lines[1]


def test_a_heartbeat_says_how_long_there_has_been_no_step() -> None:
    clock, lines = Clock(), []
    progress = Progress(ProgressState(40, clock=clock), lines.append)
    progress.phase("engines")
    clock.now += 60
    progress.heartbeat("")
    progress.step(1, METRICS)
    clock.now += 61
    assert progress.quiet_seconds == 61
    progress.heartbeat("3 groups in flight")
    assert progress.quiet_seconds == 0
    clock.now += 60
    progress.heartbeat("2 groups in flight")
    assert [line for line in lines if "starting engines after" in line or line.startswith("no step")] == [
        "still starting engines after 1:00",
        "no step for 1:01: 3 groups in flight",
        "no step for 2:01: 2 groups in flight",
    ]


def test_an_evaluation_alone_says_how_many_samples_have_ended() -> None:
    clock, lines = Clock(), []
    progress = Progress(ProgressState(0, clock=clock), lines.append)
    with progress:
        progress.phase("the first samples")
        clock.now += 4
        progress.evaluating(3)
        clock.now += 90
        progress.evaluating(70)
        assert progress.quiet_seconds == 0  # so it is no heartbeat's turn
    assert lines == [
        "starting the first samples ...",
        "the first samples ready after 4.0 s",
        "evaluated 3 samples in 0:04",
        "evaluated 70 samples in 1:34",
    ]


def test_a_heartbeat_scrolls_above_the_live_display() -> None:
    output = io.StringIO()
    with LiveProgress(ProgressState(40), Console(file=output, force_terminal=True, width=120)) as progress:
        progress.step(1, METRICS)
        progress.heartbeat("3 groups in flight")
    assert "no step for 0:00: 3 groups in flight" in output.getvalue()
