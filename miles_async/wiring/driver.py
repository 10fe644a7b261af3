"""The driver's process: Arguments in, a finished run out.

It runs controller, publisher and recorder. The rollout side (``rollout_process.py``) and the trainer's ranks
(``trainer_process.py``) are Ray actors. However the run ends (done, an error on either side, Ctrl-C, SIGTERM), both
sides are stopped, then Ray, and the summary says what was done so far.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
from msgspec import to_builtins

from miles_async.arguments import Arguments
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.paths import with_absolute_paths
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.checkpoints.manifest import RunIdentity, fingerprint, new_run_name
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.controller import Controller
from miles_async.errors import (
    ConfigurationError,
    LedgerError,
    ProcessLostError,
    PublicationError,
    StalledError,
    SummaryError,
    first_error,
)
from miles_async.ledger.reader import open_ledger
from miles_async.observability.logs import configure_logging
from miles_async.observability.plots import plot_run
from miles_async.observability.progress import Progress, open_progress
from miles_async.observability.recorder import RunRecorder
from miles_async.observability.summary import Ending, RunSummary, write_summary
from miles_async.observability.summary_view import print_summary
from miles_async.observability.trackers import open_trackers
from miles_async.rollout.actor import RolloutActor, RolloutProcess
from miles_async.runtime.control import ControlServer, Handler
from miles_async.runtime.device import choose_device
from miles_async.runtime.environment import secret_environment, worker_environment
from miles_async.runtime.fork_server_process import ForkServers
from miles_async.runtime.keys import make_run_keys
from miles_async.runtime.last_resort import LastResort
from miles_async.runtime.node_files import marked
from miles_async.runtime.own_ray import OwnRay
from miles_async.runtime.owned_directory import OwnedDirectory, sweep_temporary, temporary_parent
from miles_async.runtime.ray_cluster import ray_cluster
from miles_async.runtime.restarted import own_restarts, write_restarts
from miles_async.runtime.run_directory import CONFIG_FILE, LEDGER_FILE, claimed
from miles_async.runtime.run_process import kill_marked, read_run_process
from miles_async.runtime.stall_report import waiting_tasks
from miles_async.runtime.tasks import afterwards
from miles_async.seams import EngineFleet, RolloutSide
from miles_async.trainer.ranks import TrainerRanks
from miles_async.types import RolloutStats
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater
from miles_async.weights.verify import canary_tolerance
from miles_async.wiring.fork_servers import fork_servers
from miles_async.wiring.placement import place_run
from miles_async.wiring.rollout_process import build_rollout
from miles_async.wiring.trainer_process import (
    SHARED_WITH_ENGINES,
    shared_directories,
    trainer_ranks,
)

log = structlog.get_logger(__name__)

STOP_SECONDS = 30.0  # for a side to stop by itself before its processes are ended
STATS_SECONDS = 10.0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ENGINE_RESTART_SECONDS = 60.0  # for an engine's death to be noticed, before it starts again


def run(arguments: Arguments, imports: ForkServers) -> int:
    """Run to the end. Returns the exit code: 0 done, 130 interrupted. Raises the first error of either side.

    ``imports``: what processes of this run are forked from (``early_imports.py``).
    """
    arguments = with_absolute_paths(arguments)
    run_dir = arguments.observability.run_dir
    sweep_temporary(arguments.weights.weight_staging_dir)  # of runs that were killed
    try:
        temporary = OwnedDirectory(temporary_parent(), mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"the run has no place for temporary files (TMPDIR): {error}") from error
    try:
        with claimed(run_dir, temporary.path / "control"):
            configure_logging(run_dir, arguments.observability.log_level)
            write_config(arguments, run_dir)
            _note_restarts(run_dir)
            return _to_the_end(Run(arguments, imports, run_dir, temporary.path))
    finally:
        temporary.remove()
        sweep_temporary(arguments.weights.weight_staging_dir)  # of engines and ranks that were killed


def _to_the_end(training: Run) -> int:
    with LastResort(training.end_at_once, training.lost) as last_resort:

        async def main() -> None:
            last_resort.interrupts_this_task()
            await training.main(last_resort.all_is_up)

        try:
            asyncio.run(main())
        except BaseException as error:
            # What fails when Ray's processes got the same signal is no failure of the run.
            if last_resort.interrupted or isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                if isinstance(error, Exception):
                    log.warning("something failed while the run was being ended", error=repr(first_error(error)))
                training.try_to_report("interrupted")
                return EXIT_INTERRUPTED
            cause = first_error(error)
            training.try_to_report("lost" if training.lost() else _ending_with(cause), str(cause))
            raise cause from error
        training.report("finished")
        return 0


def _ending_with(error: BaseException) -> Ending:
    if isinstance(error, ProcessLostError):
        return "lost"
    return "stalled" if isinstance(error, StalledError) else "failed"


def write_config(arguments: Arguments, run_dir: Path) -> None:
    """Every flag in force. Raises ConfigurationError if it cannot be written."""
    try:
        (run_dir / CONFIG_FILE).write_text(to_toml(arguments))
    except OSError as error:
        raise ConfigurationError(f"--run-dir {run_dir}: {error}") from error


def _note_restarts(run_dir: Path) -> None:
    """Tell the run directory and the log of the run's earlier lives."""
    restarts = own_restarts()
    try:
        write_restarts(run_dir, restarts)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {run_dir}: {error}") from error
    if restarts:
        log.warning("the run was restarted", times=len(restarts), **to_builtins(restarts[-1]))


class Run:
    """One run: its parts, in the order in which they start and, reversed, stop."""

    def __init__(self, arguments: Arguments, imports: ForkServers, run_dir: Path, sockets: Path) -> None:
        """``sockets``: directory for those that this process and its children listen on."""
        self._arguments = arguments
        self._imports = imports
        self._run_dir = run_dir
        self._device = choose_device(arguments.cluster.device)
        self._summary = RunSummary()
        self._started = time.monotonic()
        self._stats: RolloutStats | None = None  # as last heard
        self._version = 0
        self._sockets = sockets
        self._own_ray = OwnRay() if arguments.cluster.ray_address is None else None

    async def main(self, all_is_up: Callable[[], None]) -> None:
        """Start everything, run the controller, stop everything."""
        arguments = self._arguments
        environment = worker_environment(arguments.cluster.forward_env, cpu=self._device == "cpu")
        place = self._run_dir, self._device
        servers = fork_servers(arguments, *place, self._sockets, environment)
        self._imports.fork(servers)
        with (
            open_progress(arguments.rollout.num_rollout, live=arguments.observability.progress) as progress,
            marked(shared_directories(arguments)) as marks,
        ):
            progress.phase("Ray")
            async with (
                afterwards(self._imports.stop),  # processes that outlive Ray own files that are swept at the end
                ray_cluster(arguments.cluster.ray_address, environment, self._own_ray),
            ):
                placement = await place_run(arguments, self._device)
                progress.phase("engines, router and trainer ranks")
                rollout = RolloutProcess(
                    partial(
                        build_rollout,
                        arguments,
                        *place,
                        make_run_keys(os.environ),
                        secret_environment(arguments.cluster.forward_env),
                        servers.for_engines(),
                        {flag: mark for flag, mark in marks.items() if flag in SHARED_WITH_ENGINES},
                        placement,
                    ),
                    servers.interpreter(f"ray::{RolloutActor.__name__}"),
                )
                trainer = trainer_ranks(arguments, *place, environment, servers.ranks, marks, placement.trainer)
                async with afterwards(partial(rollout.stop, STOP_SECONDS)), afterwards(trainer.stop):
                    async with asyncio.TaskGroup() as scope:
                        scope.create_task(rollout.start())
                        scope.create_task(trainer.start())
                    all_is_up()
                    async with ControlServer(self._sockets / "control", _commands(rollout.manager)):
                        await self._control(progress, rollout, trainer)

    async def _control(self, progress: Progress, rollout: RolloutProcess, trainer: TrainerRanks) -> None:
        arguments, manager = self._arguments, rollout.manager
        self._summary.record_stage("start", time.monotonic() - self._started)
        tracker = open_trackers(arguments.observability, asdict(arguments))
        if arguments.weights.verify_weights != "off":
            trainer.canary_tokens = await manager.canary()
        publisher = self._publisher(trainer, rollout)
        controller = Controller(
            rollout=manager,
            trainer=trainer,
            publisher=publisher,
            checkpoints=RunCheckpoints(trainer, manager, arguments.checkpoint, self._identity()),
            recorder=RunRecorder(tracker, progress, self._summary),
            rollout_arguments=arguments.rollout,
            staleness=arguments.staleness,
            weights=arguments.weights,
            evaluation=arguments.evaluation,
            checkpoint=arguments.checkpoint,
        )
        progress.phase("the first publication")
        try:
            await controller.run()
            if arguments.checkpoint.save_hf is not None:
                await trainer.save_hf(arguments.checkpoint.save_hf)
        except BaseException as error:
            if isinstance(first_error(error), StalledError | PublicationError):
                driver = [f"publication: {publisher.state.value}", f"{controller.position}", *waiting_tasks()]
                await self._report_stall(str(first_error(error)), driver, manager)
            raise
        finally:
            self._version = controller.position.version
            self._stats = await _last_stats(manager)
            await asyncio.to_thread(tracker.finish)

    def _publisher(self, trainer: TrainerRanks, rollout: RolloutProcess) -> WeightPublisher:
        arguments = self._arguments

        def updater(fleet: EngineFleet, name: str, engines_timeout: float, *, repair: bool = False) -> FleetUpdater:
            return FleetUpdater(
                fleet,
                make_transport(arguments.weights, trainer, fleet, self._device, name=name, repair=repair),
                arguments.weights,
                tolerance=canary_tolerance(arguments.weights.canary_tolerance, bf16=arguments.model.bf16),
                engines_timeout=engines_timeout,
            )

        apart = of_role(server_groups(arguments), "evaluation")
        return WeightPublisher(
            trainer,
            updater(rollout.fleet, "fleet", arguments.engines.engine_start_timeout + ENGINE_RESTART_SECONDS),
            arguments.weights,
            repairs=updater(rollout.fleet, "fleet-repair", 0.0, repair=True),
            # Training does not wait for these engines.
            evaluation=updater(rollout.evaluation_fleet, "evaluation_fleet", 0.0) if apart else None,
        )

    async def _report_stall(self, error: str, driver: Sequence[str], manager: RolloutSide) -> None:
        """stall.txt: who waits for whom, before everything is stopped (C10)."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                rollout = await manager.describe()
        except Exception as silence:  # supervision point: the first error must surface
            rollout = f"does not answer: {silence!r}"
        lines = [error, "", "driver", *(f"  {line}" for line in driver), "", "rollout manager", rollout]
        path = self._run_dir / "stall.txt"
        try:
            await asyncio.to_thread(path.write_text, "\n".join(lines) + "\n")
        except OSError as problem:
            log.error("the run has stalled; who waits for whom cannot be written", error=str(problem))
        else:
            log.error("the run has stalled; who waits for whom is in a file", file=str(path))

    def _identity(self) -> RunIdentity:
        assert self._arguments.model.hf_checkpoint is not None
        return RunIdentity(
            run=new_run_name(self._run_dir),
            model=fingerprint(self._arguments.model.hf_checkpoint),
            ranks=self._arguments.layout,
        )

    def report(self, ending: Ending, error: str = "") -> None:
        """summary.json, the plot and the closing table: of what was done, however the run ended.

        Raises SummaryError if summary.json cannot be written.
        """
        now, stats = time.monotonic(), self._stats
        summary = self._summary.finish(
            balance=stats.balance if stats else self._balance_on_disk(),
            trainer_idle_seconds=self._summary.stage_seconds("wait"),
            rollout_idle_seconds=stats.seconds - stats.busy_seconds if stats else 0.0,
            rollout_seconds=stats.seconds if stats else 0.0,
            wall_seconds=now - self._started,
            weight_version=self._version,
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
            plot_run(self._run_dir)
            print_summary(summary, run_dir=self._run_dir)
        except Exception as problem:  # supervision point: pictures and tables can be made again, see --run-dir
            log.warning("the run cannot be shown", error=repr(problem))

    def try_to_report(self, ending: Ending, error: str = "") -> None:
        """:meth:`report` for a run that did not finish: it raises nothing, since there is an error already."""
        try:
            self.report(ending, error)
        except Exception as problem:  # supervision point: the first error must surface
            log.warning("the run cannot be summarized", error=repr(problem))

    def lost(self) -> str:
        """Why nothing can go on, not even an orderly end; empty while it can."""
        return self._own_ray.lost() if self._own_ray is not None else ""

    def end_at_once(self, interrupted: bool, reason: str) -> NoReturn:
        """End this process and all others of the run from another thread: the main one is stuck."""
        try:
            print(f"error: {reason}; ending all processes of the run", file=sys.stderr, flush=True)
            run = read_run_process(self._run_dir)
            kill_marked(run)
            if interrupted:
                self.try_to_report("interrupted")
            else:
                self.try_to_report("lost" if self.lost() else "failed", reason)
            sweep_temporary(self._arguments.weights.weight_staging_dir)
            shutil.rmtree(Path(run.control).parent, ignore_errors=True)
        finally:  # even if the run directory is gone
            os._exit(EXIT_INTERRUPTED if interrupted else EXIT_FAILED)

    def _balance_on_disk(self) -> dict[str, int]:
        """Balance by the ledger on disk, for when the rollout side is gone: all but its last moment."""
        try:
            with open_ledger(self._run_dir / LEDGER_FILE) as ledger:
                return ledger.balance().summary()
        except LedgerError:
            return {}


def _commands(rollout: RolloutSide) -> Mapping[str, Handler]:
    """Commands that the control socket accepts."""

    async def scale(group: str, engines: int) -> str:
        await rollout.scale(group, engines)
        return await rollout.engines()

    return {"scale": scale, "engines": rollout.engines}


async def _last_stats(manager: RolloutSide) -> RolloutStats | None:
    """Return the last statistics for the summary; None if the rollout side is gone."""
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return await manager.last_stats()
    except Exception as error:  # supervision point: the run is ending, and its first error must surface
        log.debug("no last word from the rollout side", error=repr(error))
        return None
