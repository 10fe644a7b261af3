"""One run, wired: its parts, and the loop of the configured sides.

The driver's process (``driver_process.py``) runs controller, publisher and recorder. The rollout side
(``rollout_process.py``) and the trainer's ranks (``trainer_process.py``) are Ray actors.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog

from miles_async.arguments import Arguments
from miles_async.arguments.debug import Sides
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.bad_steps import BadSteps
from miles_async.checkpoints.manifest import RunIdentity, fingerprint, new_run_name
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.checkpoints.save_lock import SaveLock
from miles_async.checkpoints.start import kept_settings
from miles_async.controller import Controller
from miles_async.errors import EXIT_FAILED, EXIT_INTERRUPTED, PublicationError, StalledError, first_error
from miles_async.observability.heartbeat import heartbeat
from miles_async.observability.progress import Progress, open_progress
from miles_async.observability.recorder import RunRecorder
from miles_async.observability.trackers import open_trackers
from miles_async.rollout.actor import RolloutActor, RolloutProcess
from miles_async.runtime.cluster.node_files import marked
from miles_async.runtime.cluster.ray_cluster import OwnRay, ray_cluster
from miles_async.runtime.device import choose_device
from miles_async.runtime.environment import secret_environment, worker_environment
from miles_async.runtime.files.owned_directory import sweep_temporary
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.control import ControlServer, Handler
from miles_async.runtime.network.keys import make_run_keys
from miles_async.runtime.processes.fork_server_process import ForkServers
from miles_async.runtime.processes.run_process import kill_marked, read_run_process
from miles_async.runtime.stall_report import waiting_tasks
from miles_async.runtime.tasks import afterwards, first_of
from miles_async.seams import EngineFleet, Position
from miles_async.single_side import evaluation_alone, rollouts_alone, training_alone
from miles_async.trainer.ranks import TrainerRanks
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater
from miles_async.weights.verify import canary_tolerance
from miles_async.wiring.fork_servers import RunForkServers, fork_servers
from miles_async.wiring.gpus import OwnGpus, RunGpus, SharedGpus, shared_places
from miles_async.wiring.live_settings import LiveSettings
from miles_async.wiring.placement import RunPlacement, place_run
from miles_async.wiring.prepared_batches import DumpedBatches, SupervisedBatches
from miles_async.wiring.report import RunReport
from miles_async.wiring.rollout_process import build_rollout
from miles_async.wiring.trainer_process import SHARED_WITH_ENGINES, shared_directories, trainer_ranks

log = structlog.get_logger(__name__)

STOP_SECONDS = 30.0  # for a side to stop by itself before its processes are ended
_STARTING: Mapping[Sides, str] = {
    "both": "engines, router and trainer ranks",
    "rollout": "engines and router",
    "trainer": "trainer ranks",
}
ENGINE_RESTART_SECONDS = 60.0  # for an engine's death to be noticed, before it starts again


class Run:
    """One run: its parts, in the order in which they start and, reversed, stop."""

    def __init__(
        self, arguments: Arguments, imports: ForkServers, run_dir: Path, sockets: Path, lock: SaveLock | None = None
    ) -> None:
        """``sockets``: directory for sockets of this process and its children. ``lock``: of ``--save``."""
        self._lock = lock
        self._arguments = arguments
        self._imports = imports
        self._run_dir = run_dir
        self._device = choose_device(arguments.cluster.device)
        self.report = RunReport(run_dir)
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
                heartbeat(progress, self._run_dir / LEDGER_FILE),
                afterwards(self._imports.stop),  # last: its processes own files that are swept at the end
                ray_cluster(arguments.cluster.ray_address, environment, self._own_ray),
            ):
                placement = await place_run(arguments, self._device)
                sides = arguments.sides
                progress.phase(_STARTING[sides])
                trainer = (
                    None
                    if sides == "rollout"
                    else trainer_ranks(arguments, *place, environment, servers.ranks, marks, placement.trainer)
                )
                if arguments.cluster.colocate and trainer is not None:
                    placement = replace(placement, engines=shared_places(arguments, await trainer.locations()))
                rollout = None if sides == "trainer" else self._rollout(servers, marks, placement)
                gpus: RunGpus = OwnGpus()
                if arguments.cluster.colocate and rollout is not None and trainer is not None:
                    gpus = SharedGpus(rollout.fleet, trainer)
                async with AsyncExitStack() as stopping:
                    if rollout is not None:
                        await stopping.enter_async_context(afterwards(partial(rollout.stop, STOP_SECONDS)))
                    if trainer is not None:
                        await stopping.enter_async_context(afterwards(trainer.stop))
                    await gpus.start(*(side.start for side in (rollout, trainer) if side is not None))
                    all_is_up()
                    live = None
                    if rollout is not None and trainer is not None:
                        live = LiveSettings(
                            arguments,
                            kept_settings(arguments.checkpoint.load),
                            rollout.manager.change,
                            trainer_changes=trainer.changes_settings,
                        )
                    async with ControlServer(self._sockets / "control", _commands(rollout, live)):
                        await self._control(progress, rollout, trainer, gpus, live)

    def _rollout(self, servers: RunForkServers, marks: Mapping[str, Path], placement: RunPlacement) -> RolloutProcess:
        arguments = self._arguments
        return RolloutProcess(
            partial(
                build_rollout,
                arguments,
                self._run_dir,
                self._device,
                make_run_keys(os.environ),
                secret_environment(arguments.cluster.forward_env),
                servers.for_engines(),
                {flag: mark for flag, mark in marks.items() if flag in SHARED_WITH_ENGINES},
                placement,
            ),
            servers.interpreter(f"ray::{RolloutActor.__name__}"),
            patience=arguments.observability.stall_timeout,
            log_file=self._run_dir / "logs" / "rollout-output.log",
        )

    async def _control(
        self,
        progress: Progress,
        rollout: RolloutProcess | None,
        trainer: TrainerRanks | None,
        gpus: RunGpus,
        live: LiveSettings | None,
    ) -> None:
        """Run the loop of the configured sides."""
        arguments = self._arguments
        self.report.started()
        tracker = open_trackers(arguments.observability, asdict(arguments), Network.of_run(arguments.cluster))
        recorder = RunRecorder(tracker, progress, self.report.summary)
        try:
            if rollout is None:
                assert trainer is not None
                progress.phase("the first step")
                await self._training_alone(trainer, recorder)
            elif arguments.evaluation.eval_only:
                progress.phase("the first samples")
                await evaluation_alone(rollout.manager, rollout.fleet, recorder, progress.evaluating)
            elif trainer is None:
                progress.phase("the first batch")
                await rollouts_alone(rollout.manager, rollout.fleet, recorder, arguments.rollout.num_rollout)
            else:
                progress.phase("the first publication")
                assert live is not None
                await self._both(rollout, trainer, recorder, gpus, live)
            if trainer is not None and arguments.checkpoint.save_hf is not None:
                await gpus.for_training(None)
                await trainer.save_hf(arguments.checkpoint.save_hf)
        finally:
            if rollout is not None:
                await self.report.collect_stats(rollout.manager)
            await asyncio.to_thread(tracker.finish)

    async def _both(
        self,
        rollout: RolloutProcess,
        trainer: TrainerRanks,
        recorder: RunRecorder,
        gpus: RunGpus,
        live: LiveSettings,
    ) -> None:
        arguments, manager = self._arguments, rollout.manager
        if arguments.weights.verify_weights != "off":
            trainer.canary_tokens = await manager.canary()
        publisher = self._publisher(trainer, rollout)
        controller = Controller(
            rollout=manager,
            trainer=trainer,
            publisher=publisher,
            checkpoints=RunCheckpoints(
                trainer, manager, arguments.checkpoint, self._identity(), self._lock, settings=live.kept
            ),
            recorder=recorder,
            gpus=gpus,
            live=live,
            rollout_arguments=arguments.rollout,
            staleness=arguments.staleness,
            optimizer=arguments.optimizer,
            weights=arguments.weights,
            evaluation=arguments.evaluation,
            checkpoint=arguments.checkpoint,
        )
        try:
            await first_of(controller.run(), trainer.supervise())
        except BaseException as error:
            if isinstance(first_error(error), StalledError | PublicationError):
                driver = [f"publication: {publisher.state.value}", f"{controller.position}", *waiting_tasks()]
                await self.report.stalled(str(first_error(error)), driver, manager)
            raise
        finally:
            self.report.version = controller.position.version

    async def _training_alone(self, trainer: TrainerRanks, recorder: RunRecorder) -> None:
        arguments = self._arguments
        supervised = SupervisedBatches(arguments) if arguments.algorithm.supervised else None
        checkpoints = RunCheckpoints(trainer, supervised, arguments.checkpoint, self._identity(), self._lock)

        async def save(step: int) -> None:
            if arguments.checkpoint.due(step, last=step == arguments.rollout.num_rollout):
                await checkpoints.save(Position(step=step))
                recorder.checkpoint(step, await checkpoints.finish())

        try:
            first = (await checkpoints.load() or Position()).step
            if not arguments.debug.exports:
                await training_alone(
                    trainer,
                    supervised or DumpedBatches(arguments),
                    recorder,
                    BadSteps(arguments.optimizer),
                    first=first,
                    steps=arguments.rollout.num_rollout,
                    save=save,
                    trained=supervised.trained if supervised is not None else None,
                )
        finally:
            if supervised is not None:
                await supervised.finish()

    def _publisher(self, trainer: TrainerRanks, rollout: RolloutProcess) -> WeightPublisher:
        arguments = self._arguments

        def updater(fleet: EngineFleet, name: str, engines_timeout: float, *, repair: bool = False) -> FleetUpdater:
            return FleetUpdater(
                fleet,
                make_transport(arguments.weights, trainer, fleet, self._device, name=name, repair=repair),
                arguments.weights,
                tolerance=canary_tolerance(arguments.weights, bf16=bool(arguments.model.bf16), device=self._device),
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

    def _identity(self) -> RunIdentity:
        return RunIdentity(
            run=new_run_name(self._run_dir),
            model=fingerprint(self._arguments.model, self._arguments.critic.critic_hf_checkpoint),
            ranks=self._arguments.layout,
        )

    def lost(self) -> str:
        """Why the run cannot continue or end in order; empty if it can."""
        return self._own_ray.lost() if self._own_ray is not None else ""

    def end_at_once(self, interrupted: bool, reason: str) -> NoReturn:
        """End this process and all others of the run from another thread: the main one is stuck."""
        try:
            print(f"error: {reason}; ending all processes of the run", file=sys.stderr, flush=True)
            run = read_run_process(self._run_dir)
            kill_marked(run)
            if interrupted:
                self.report.try_to_write("interrupted")
            else:
                self.report.try_to_write("lost" if self.lost() else "failed", reason)
            sweep_temporary(self._arguments.weights.weight_staging_dir)
            shutil.rmtree(Path(run.control).parent, ignore_errors=True)
        finally:  # even if the run directory is gone
            os._exit(EXIT_INTERRUPTED if interrupted else EXIT_FAILED)


async def _no_engines() -> str:
    return "this run has no engines"


def _commands(rollout: RolloutProcess | None, live: LiveSettings | None) -> Mapping[str, Handler]:
    if rollout is None:
        return {"engines": _no_engines}
    manager = rollout.manager

    async def scale(group: str, engines: int) -> str:
        await manager.scale(group, engines)
        return await manager.engines()

    of_engines: Mapping[str, Handler] = {"scale": scale, "engines": manager.engines}
    return of_engines if live is None else {**of_engines, "set": live.set, "settings": live.settings}
