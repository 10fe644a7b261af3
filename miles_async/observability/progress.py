"""Progress on the console: a live display on a terminal, one plain line per step elsewhere.

Used as a context manager, so that every ending, Ctrl-C included, gives the terminal back as it was. Both
displays always show lead and age together (P9): a run that is ahead is not necessarily training on old data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Self, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from miles_async.observability.progress_state import MISSING, ProgressState, StepView

REFRESH_PER_SECOND = 4  # a redraw costs a millisecond; more would only flicker over slow connections


class Progress:
    """One plain line per phase, step, evaluation and heartbeat: for log files and pipes. A context manager that ends
    the display.
    """

    def __init__(self, state: ProgressState, write: Callable[[str], None] | None = None) -> None:
        self._state = state
        self._write = write or _write_line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """Begin a phase of start-up ("engines") and end the one before. The first step ends the last phase."""
        self._end_phase(name)
        self._write(f"starting {name} ...")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._end_phase(None)
        self._stepped(self._state.add_step(step, metrics))

    def evaluating(self, ended: int) -> None:
        """Show how far an evaluation is that nothing else waits for. ``ended``: samples."""
        if self._state.phase is not None:
            self._end_phase(None)
        self._say(self._state.add_evaluated(ended), "cyan")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.add_evaluation(metrics)
        self._say(f"evaluation after {step} steps: mean reward {metrics['eval/reward']:.3f}", "cyan")

    @property
    def quiet_seconds(self) -> float:
        return self._state.quiet_seconds

    def heartbeat(self, doing: str) -> None:
        """Report that there is no new step, and what the run is ``doing``."""
        self._say(self._state.beat(doing), "yellow")

    def close(self) -> None:
        """End the display; idempotent."""
        self._state.begin_phase(None)

    def _end_phase(self, next_phase: str | None) -> None:
        if (ended := self._state.begin_phase(next_phase)) is not None:
            self._phase_ended(*ended)

    def _phase_ended(self, name: str, seconds: float) -> None:
        self._write(f"{name} ready after {seconds:.1f} s")

    def _stepped(self, view: StepView) -> None:
        self._write(step_line(view))

    def _say(self, line: str, style: str) -> None:
        self._write(line)


def open_progress(total_steps: int, *, live: bool = True, console: Console | None = None) -> Progress:
    """Open the display: live on a terminal if ``live`` (``--progress``), plain lines otherwise."""
    console = console or Console(file=cast(IO[str], _Outlived(sys.stdout)))
    state = ProgressState(total_steps)
    return LiveProgress(state, console) if live and console.is_terminal else Progress(state)


class LiveProgress(Progress):
    """A bar, the reward's curve and the state of both sides, redrawn in place; logs scroll above it."""

    def __init__(self, state: ProgressState, console: Console) -> None:
        super().__init__(state)
        self._spinner = Spinner("dots")  # one for all redraws: it keeps its place in the animation
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESH_PER_SECOND,
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def phase(self, name: str) -> None:
        """Show it until it ends."""
        self._end_phase(name)

    def close(self) -> None:
        super().close()
        self._live.stop()

    def _phase_ended(self, name: str, seconds: float) -> None:
        self._live.console.print(Text.assemble(("✓ ", "green"), name, (f" {seconds:.1f} s", "dim")))

    def _stepped(self, view: StepView) -> None:
        """The next redraw shows it."""

    def _say(self, line: str, style: str) -> None:
        self._live.console.print(Text(line, style))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._state.phase is not None:
            seconds = (f"{self._state.phase_seconds:.0f} s", "dim")
            self._spinner.update(text=Text.assemble(f"starting {self._state.phase} ", seconds))
            parts.append(self._spinner)
        if (view := self._state.view) is not None:
            parts += [_bar(view), _details(view)]
        return Group(*parts)


def _bar(view: StepView) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=view.total, completed=view.step, width=30)
    title = Text(f"step {view.step}/{view.total}", "bold")
    row.add_row(title, bar, f"{view.step_seconds} per step", f"ETA {view.eta}")
    return row


def _details(view: StepView) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    if view.reward == MISSING:
        grid.add_row(Text("loss", "dim"), Text(view.loss, "bold"))
        return grid
    reward = Text.assemble((view.reward, "bold"), f" (avg {view.reward_average}) ", (view.spark, "green"))
    for label, value in (
        ("reward", reward),
        ("eval reward", view.evaluation),
        ("age", view.age),
        (
            "lead",
            f"{view.lead} groups: {view.in_flight} in flight, {view.buffered} buffered"
            + (f", {view.filtered} filtered" if view.filtered else ""),
        ),
        ("trainer idle", view.trainer_idle),
    ):
        grid.add_row(Text(label, "dim"), value)
    return grid


def step_line(view: StepView, *, over: bool = False) -> str:
    """The plain form of one step; without an ETA if the run is ``over``."""
    eta = "" if over else f"  ETA {view.eta}"
    if view.reward == MISSING:  # supervised fine-tuning
        return f"step {view.step}/{view.total}  loss {view.loss}  {view.step_seconds}{eta}"
    filtered = f"  filtered {view.filtered}" if view.filtered else ""
    return (
        f"step {view.step}/{view.total}  reward {view.reward} (avg {view.reward_average})  age {view.age}  "
        f"lead {view.lead}  in flight {view.in_flight}  buffered {view.buffered}{filtered}  "
        f"trainer idle {view.trainer_idle}  {view.step_seconds}{eta}"
    )


def _write_line(line: str) -> None:
    print(line, file=_Outlived(sys.stdout), flush=True)  # flushed: readers of a log want the step when it happens


class _Outlived:
    """An output that may end before the run: `| head`, a tee that died, a closed terminal, a log on a full disk. The
    run continues, and its files have everything.
    """

    def __init__(self, output: IO[str]) -> None:
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def write(self, text: str) -> int:
        with self._discarding():
            self._output.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self._output.flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._output.fileno())
