"""End-of-run report: summary.json, the plot, the closing table, and who waited for whom after a stall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from msgspec import to_builtins

from miles_async.errors import SummaryError
from miles_async.observability.heartbeat import read_balance
from miles_async.observability.plots import plot_run
from miles_async.observability.summary import Ending, RunSummary, write_summary
from miles_async.observability.summary_view import print_summary
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.runtime.processes.restarts import own_restarts
from miles_async.seams import RolloutSide
from miles_async.types import RolloutStats

log = structlog.get_logger(__name__)

STATS_SECONDS = 10.0


class RunReport:
    """Collects the facts of a run, and reports them however the run ends."""

    def __init__(self, run_dir: Path) -> None:
        self.summary = RunSummary()
        self.version = 0  # of the trainer's weights
        self._run_dir = run_dir
        self._started = time.monotonic()
        self._stats: RolloutStats | None = None  # as last heard

    def started(self) -> None:
        """Note that all parts are up."""
        self.summary.record_stage("start", time.monotonic() - self._started)

    async def collect_stats(self, rollout: RolloutSide) -> None:
        """Take the last statistics, if the rollout side still answers."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._stats = await rollout.last_stats()
        except Exception as error:  # supervision point: the run is ending, and its first error must surface
            log.debug("no last word from the rollout side", error=repr(error))

    async def stalled(self, error: str, driver: Sequence[str], rollout: RolloutSide) -> None:
        """Write stall.txt, before everything is stopped: who waits for whom (C10)."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                described = await rollout.describe()
        except Exception as silence:  # supervision point: the first error must surface
            described = f"does not answer: {silence!r}"
        lines = [error, "", "driver", *(f"  {line}" for line in driver), "", "rollout manager", described]
        path = self._run_dir / "stall.txt"
        try:
            await asyncio.to_thread(path.write_text, "\n".join(lines) + "\n")
        except OSError as problem:
            log.error("the run has stalled; who waits for whom cannot be written", error=str(problem))
        else:
            log.error("the run has stalled; who waits for whom is in a file", file=str(path))

    def write(self, ending: Ending, error: str = "") -> None:
        """Write summary.json, print the closing table and draw the plot, however the run ended.

        Raises SummaryError if summary.json cannot be written.
        """
        stats = self._stats
        # By the ledger if the rollout side is gone; it may lack the last moment.
        on_disk = None if stats else read_balance(self._run_dir / LEDGER_FILE)
        summary = self.summary.finish(
            balance=stats.balance if stats else on_disk.summary() if on_disk else {},
            rollout_idle_seconds=stats.seconds - stats.busy_seconds if stats else 0.0,
            rollout_seconds=stats.seconds if stats else 0.0,
            wall_seconds=time.monotonic() - self._started,
            weight_version=self.version,
        )
        summary["ending"] = ending
        if error:
            summary["error"] = error
        if restarts := own_restarts():
            summary["restarts"] = to_builtins(restarts)
        path = self._run_dir / "summary.json"
        try:
            write_summary(summary, path)
        except OSError as problem:
            raise SummaryError(
                f"the run has {ending}, and its summary cannot be written: {path}: {problem}"
            ) from problem
        if not summary["steps"]:
            return
        try:
            print_summary(summary, self._run_dir)
            if summary["reward_first"] is not None:
                plot_run(self._run_dir)
        except Exception as problem:  # supervision point: pictures and tables can be made again, see --run-dir
            log.warning("the run cannot be shown", error=repr(problem))

    def try_to_write(self, ending: Ending, error: str = "") -> None:
        """:meth:`write` for a run that did not finish: it raises nothing, since there is an error already."""
        try:
            self.write(ending, error)
        except Exception as problem:  # supervision point: the first error must surface
            log.warning("the run cannot be summarized", error=repr(problem))
