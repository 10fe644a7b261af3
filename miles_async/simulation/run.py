"""Put a simulation together: the parts of a run (``wiring/``), three of them exchanged for simulated ones."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from miles_async.algorithms.advantages.estimators import Grpo
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.checkpoints.manifest import RunIdentity
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.controller import Controller
from miles_async.errors import first_error
from miles_async.ledger.schedule import ScheduleWriter
from miles_async.ledger.writer import LedgerWriter
from miles_async.rewards.guard import GuardedReward
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.dispatcher import Dispatcher, Hooks
from miles_async.rollout.generate import SingleTurnGenerate, sampling_parameters
from miles_async.rollout.manager import RolloutManager
from miles_async.runtime.garbage import rare_collections
from miles_async.runtime.services import Services
from miles_async.seams import NO_CHANGES, LiveSettings
from miles_async.simulation.engines import SimulatedEngines
from miles_async.simulation.hooks import (
    RolloutProcess,
    SimulatedDecoder,
    SimulatedEpisode,
    SimulatedPrompts,
    SimulatedReward,
)
from miles_async.simulation.recording import EventLog, PoolRecorder, Recording
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.settings import SimulationSettings
from miles_async.simulation.trainer import SimulatedTrainer
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.staleness.versions import OldestVersions
from miles_async.train_data.batch_maker import BatchMaker, RecordBatch
from miles_async.trajectory.rendering import Decoder
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.distributed.driver import DistributedTransport
from miles_async.weights.transports.spec import DriverSide
from miles_async.weights.update import FleetUpdater
from miles_async.wiring.decisions import make_pool

REWARD_SERVICE = "the simulated reward service"
MAX_TOKENS = 1 << 40  # packing is not simulated: one micro-batch


def simulate(settings: SimulationSettings) -> SimulationResult:
    """Simulate one run. Raises the first error of either side, as a real run does."""
    with quiet_logs(), seeded(settings.seed), rare_collections():
        started = time.process_time()
        return run_in_virtual_time(_simulate(settings, started), limit_seconds=settings.limit_seconds)


async def _simulate(settings: SimulationSettings, started: float) -> SimulationResult:
    simulation = Simulation(settings)
    try:
        await simulation.run()
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return simulation.result(cpu_seconds=time.process_time() - started)


class Simulation:
    """Parts of one simulated run. Create it on the loop of virtual time that it runs on."""

    def __init__(
        self,
        settings: SimulationSettings,
        make_engines: Callable[[SimulationSettings, EventLog], SimulatedEngines] = SimulatedEngines,
        decoder: Decoder | None = None,
        live: LiveSettings = NO_CHANGES,
    ) -> None:
        rollout, staleness = settings.rollout, settings.staleness
        clock = asyncio.get_running_loop().time
        ledger = LedgerWriter(settings.ledger, clock=clock) if settings.ledger else None
        schedule = ScheduleWriter(settings.schedule, clock=clock) if settings.schedule else None
        self.settings = settings
        self.log = EventLog(enabled=settings.trace)
        self.engines = make_engines(settings, self.log)
        self.trainer = SimulatedTrainer(settings, self.log)
        self.source = SimulatedPrompts()
        self.rollout_process = RolloutProcess(settings.rollout_cpu_seconds)
        self.services = Services(
            outage_timeout=rollout.service_outage_timeout, max_failures=rollout.max_sample_failures
        )
        self.observer = PoolRecorder(self.log, lambda: self.pool.lead())
        self.pool = make_pool(
            rollout,
            staleness,
            observers=[self.observer.note, *([ledger.note] if ledger else [])],
            record=schedule.pool if schedule else None,
        )
        self.recording = Recording(self.pool, self.log)
        oldest = OldestVersions(self.engines.traffic.dispatched)
        self.manager = RolloutManager(
            engines=self.engines,
            source=self.source,
            dispatcher=Dispatcher(
                pool=self.pool,
                source=self.source,
                client=self.engines.client,
                hooks=Hooks(
                    generate=SimulatedEpisode(
                        SingleTurnGenerate(
                            sampling_parameters(rollout), decoder or SimulatedDecoder(), began=oldest.note
                        ),
                        self.rollout_process,
                        settings,
                    ),
                    reward=GuardedReward(SimulatedReward(settings), None, self.services.circuit(REWARD_SERVICE)),
                ),
                arguments=rollout,
                concurrency=Concurrency(self.engines.loads, rollout),
                visible_version=lambda: self.engines.registry.version,
                stall_timeout=settings.stall_timeout,
                services=self.services,
                min_samples=staleness.min_samples(rollout.n_samples_per_prompt),
                oldest_versions=oldest,
            ),
            batches=batch_maker(settings, record=schedule.batch if schedule else None),
            evaluator=None,
            put=lambda shard: shard,
            writers=[writer for writer in (ledger, schedule) if writer],
        )
        self.controller = Controller(
            rollout=self.manager,
            trainer=self.trainer,
            publisher=WeightPublisher(
                self.trainer, self._updater(), settings.weights, repairs=self._updater("repairs")
            ),
            checkpoints=RunCheckpoints(
                self.trainer, self.manager, settings.checkpoint, RunIdentity(run="simulation", model={}, ranks={})
            ),
            recorder=self.recording,
            live=live,
            rollout_arguments=rollout,
            staleness=staleness,
            optimizer=OptimizerArguments(),
            weights=settings.weights,
            evaluation=settings.evaluation,
            checkpoint=settings.checkpoint,
        )

    def _updater(self, name: str = "weights") -> FleetUpdater:
        settings, fleet = self.settings, self.engines.fleet
        side = DriverSide(sender=self.trainer.sender, fleet=fleet, name=name)
        return FleetUpdater(
            fleet,
            DistributedTransport(side),
            settings.weights,
            tolerance=1e-3,
            engines_timeout=settings.engines.engine_start_timeout + 60,
        )

    async def run(self) -> None:
        """Run from the start of the engines until they have stopped, however the run ends."""
        try:
            await self.engines.start()
            await self.controller.run()
        finally:
            await self.manager.stop()

    def result(self, *, cpu_seconds: float = 0.0) -> SimulationResult:
        settings, meter = self.settings, self.engines.meter
        return SimulationResult(
            steps=tuple(self.recording.steps),
            publications=tuple(self.recording.publications),
            balance=self.pool.balance().summary(),
            trained_lengths=self.observer.trained,
            max_lead=self.observer.max_lead,
            seconds=asyncio.get_running_loop().time(),
            slot_seconds=meter.slot_seconds,
            slots=settings.num_engines * settings.slots,
            generated_tokens=meter.generated_tokens,
            rollout_cpu_seconds=self.rollout_process.busy_seconds,
            answer_lags=self.rollout_process.lags,
            drawn_lengths=meter.drawn,
            seconds_per_sample=meter.drawn_seconds / max(1, meter.drawn.total()),
            samples_per_step=settings.rollout.samples_per_rollout,
            cpu_seconds=cpu_seconds,
            trace=self.log.text(),
        )


def batch_maker(settings: SimulationSettings, *, record: RecordBatch | None = None) -> BatchMaker:
    """Make the BatchMaker for a trainer of one rank."""
    return BatchMaker(
        estimator=Grpo(AlgorithmArguments()),
        dp_size=1,
        max_tokens=MAX_TOKENS,
        optimizer_steps=1,
        bound=settings.staleness.bound,
        record=record,
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random generator, which jitter uses, and restore its state afterwards."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence warnings, which are in the event log and would flood the terminal."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
