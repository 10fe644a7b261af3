"""``--max-run-restarts``: restarts a run that a machine's fault ended, from its newest checkpoint.

This process only watches. Each life of the run is a child, an ordinary ``miles-async train`` with the same flags, so it
does not matter how its driver ended. A run counts as lost if its summary says that it lost a process, if its
driver was killed, or if it stalled after it had worked: a machine or a link is then the likelier cause than a flag. All
other endings are final: done, an error in flags, data or code, or Ctrl-C, which is passed to the child at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints.files import Checkpoint, list_checkpoints
from miles_async.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigurationError
from miles_async.runs.ending import end_leftovers
from miles_async.runs.starting import train_command
from miles_async.runtime.files.owned_directory import sweep_temporary
from miles_async.runtime.files.run_directory import carry_over, move_aside
from miles_async.runtime.processes import dies_with_parent
from miles_async.runtime.processes.restarts import LONGEST_REASON, RestartBudget, RunRestart, restarts_variable
from miles_async.runtime.processes.run_process import KEEPER, read_run_process
from miles_async.runtime.texts import shortened

WINDOW_SECONDS = 3600.0


def keep_running(words: Sequence[str], checkpoint: CheckpointArguments, run_dir: Path, staging: Path | None) -> int:
    """Run ``miles-async train`` with these words in child processes until it ends for good. Returns the exit code.

    ``staging``: ``--weight-staging-dir``.
    """
    command = train_command([*words, "--max-run-restarts", "0"])
    return asyncio.run(RunKeeper(command, checkpoint, run_dir, staging).run())


class RunKeeper:
    """The lives of one run, one after another."""

    def __init__(
        self, command: Sequence[str], checkpoint: CheckpointArguments, run_dir: Path, staging: Path | None = None
    ) -> None:
        """``command`` starts a life; where to resume is appended to it."""
        assert checkpoint.save is not None
        self._command = tuple(command)
        self._run_dir = run_dir.absolute()
        self._staging = staging
        self._save = checkpoint.save
        self._max_restarts = checkpoint.max_run_restarts
        self._foreign = set(map(_mark, list_checkpoints(self._save)))  # there before this run saved any
        self._restarts: list[RunRestart] = []
        self._life: asyncio.subprocess.Process | None = None
        self._interrupted: signal.Signals | None = None

    async def run(self) -> int:
        """Return the exit code of the last life; 1 for one that was killed."""
        budget = RestartBudget(self._max_restarts, WINDOW_SECONDS)
        resume: tuple[str, ...] = ()
        # Before the first life: a signal that comes as it starts is for it, too.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
        while self._interrupted is None:
            child, status = await self._live(resume)
            if self._interrupted is not None:
                break
            reason = why_lost(self._run_dir, child, status)
            if reason is None:
                return status
            await asyncio.to_thread(self._clean_up, child)
            if self._interrupted is not None:
                break
            if not budget.take():
                _say(f"{reason}; it is not restarted any more: {budget} is all that --max-run-restarts allows")
                return EXIT_FAILED
            try:
                resume = await asyncio.to_thread(self._note_restart, shortened(reason, LONGEST_REASON))
            except OSError as error:  # a disk that is full or read-only
                _say(f"{reason}; it is not restarted: {error}")
                return EXIT_FAILED
        return EXIT_INTERRUPTED

    async def _live(self, resume: Sequence[str]) -> tuple[int, int]:
        """Run one life; return its driver's pid and exit code, or minus the signal that killed it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, dies_with_parent.__file__, str(os.getpid()), *self._command, *resume),
            env={**os.environ, KEEPER: str(os.getpid()), **restarts_variable(self._restarts)},
            process_group=0,  # signals for the terminal's processes reach it through this one, once
        )
        self._life = process
        if self._interrupted is not None:
            process.send_signal(self._interrupted)
        return process.pid, await process.wait()

    def _interrupt(self, number: signal.Signals) -> None:
        self._interrupted = number
        if self._life is not None and self._life.returncode is None:
            self._life.send_signal(number)

    def _clean_up(self, child: int) -> None:
        """End processes that outlived the driver."""
        try:
            run = read_run_process(self._run_dir)
        except ConfigurationError:  # it ended before it had a run directory
            return
        if run.pid == child:
            end_leftovers(run, _say)
        sweep_temporary(self._staging)

    def _note_restart(self, reason: str) -> tuple[str, ...]:
        """Record and report a restart. Return the flags that resume from the newest checkpoint."""
        own = [checkpoint for checkpoint in list_checkpoints(self._save) if _mark(checkpoint) not in self._foreign]
        newest = str(own[-1].directory) if own else None
        aside = self._run_dir
        if aside.exists():
            aside = move_aside(self._run_dir)
            carry_over(aside, self._run_dir)
        restart = RunRestart(at=time.time(), reason=reason, run_dir=str(aside), checkpoint=newest)
        self._restarts.append(restart)
        _say(f"{restart}; restart {len(self._restarts)}, of {self._max_restarts} per hour")
        return ("--load", newest) if newest else ()


def why_lost(run_dir: Path, driver: int, status: int) -> str | None:
    """Why a run may succeed on another try: it lost a process that it needs, or stalled although it had trained or been
    restarted before. None if trying again would not help.

    ``status``: exit code of its driver, or minus the signal that killed it.
    """
    if status < 0:
        return f"the driver was killed by {signal.Signals(-status).name}"
    if status != EXIT_FAILED:
        return None
    try:
        if read_run_process(run_dir).pid != driver:
            return None  # the directory of an earlier run: this one never had it
        summary = json.loads((run_dir / "summary.json").read_text())
    except (ConfigurationError, OSError, ValueError):  # a full disk, say: no other try would do better
        return None
    ending = summary.get("ending")
    may_succeed = ending == "lost" or (ending == "stalled" and (summary["steps"] or "restarts" in summary))
    return str(summary["error"]) if may_succeed else None


def _mark(checkpoint: Checkpoint) -> tuple[Path, int, int]:
    """Tell a checkpoint from another one that is written in its place."""
    found = checkpoint.directory.stat()
    return checkpoint.directory, found.st_ino, found.st_mtime_ns


def _say(text: str) -> None:
    with suppress(OSError):  # a reader that is gone, a full disk: restarts.json has it too
        print(text, file=sys.stderr, flush=True)
