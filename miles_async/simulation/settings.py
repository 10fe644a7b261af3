"""Settings of a simulation: flags of a real run, durations and faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.arguments.weights import WeightsArguments
from miles_async.simulation.distributions import Distribution, Fixed

ONE_SECOND, NO_TIME = Fixed(1.0), Fixed(0.0)

FaultAction = Literal["crash", "refuse", "hang", "corrupt"]
"""refuse: HTTP 500. hang: no answer. corrupt: the engine has wrong weights from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """An engine's process dies."""

    at_seconds: float
    engine: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """An engine's process, or its detokenizer, is stopped for a while: answers wait until it continues."""

    at_seconds: float
    seconds: float
    engine: int
    only_tokens: bool = False  # the detokenizer: what needs no token is answered


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFault:
    """Fault at the n-th call of one HTTP path of an engine, counted over its restarts."""

    engine: int
    path: str  # "/update_weights_from_distributed"
    call: int  # the first is 1
    action: FaultAction


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    crashes: tuple[Crash, ...] = ()
    calls: tuple[CallFault, ...] = ()
    silences: tuple[Silence, ...] = ()
    mean_seconds_between_crashes: float | None = None  # per engine, exponential
    never_restart: bool = False  # engines that died don't come up again
    trainer_fails_at_step: int | None = None
    publication_hangs_at_version: int | None = None  # the trainer's export never ends
    reward_outage: tuple[float, float] | None = None  # seconds from and until which rewards cannot connect


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    rollout: RolloutArguments
    staleness: StalenessArguments
    weights: WeightsArguments = field(default_factory=WeightsArguments)
    engines: EnginesArguments = field(default_factory=EnginesArguments)
    evaluation: EvaluationArguments = field(default_factory=EvaluationArguments)
    checkpoint: CheckpointArguments = field(default_factory=CheckpointArguments)  # real files
    num_engines: int = 2
    slots_per_engine: int | None = None  # requests that run at once; None: --rollout-concurrency-per-engine
    response_seconds: Distribution = ONE_SECOND  # of one response on a slot, undisturbed
    token_seconds: float = 0.1  # responses are whole tokens
    slowness: Mapping[int, float] = field(default_factory=dict)  # engine → how many times as long it takes
    environment_seconds: Distribution = NO_TIME  # of one sample, in flight and at no engine
    reward_seconds: Distribution = NO_TIME  # of one sample that is generated
    train_seconds: Distribution = ONE_SECOND  # one rollout step
    copy_seconds: float = 0.0  # export and copy of weights: the trainer is busy, engines generate
    publish_seconds: Distribution = NO_TIME  # sending: engines are paused
    start_seconds: float = 5.0  # of one engine process
    rollout_cpu_seconds: float = 0.0  # of the rollout process, which is one core, per sample
    faults: Faults = field(default_factory=Faults)
    stall_timeout: float = 1800.0
    limit_seconds: float = math.inf  # of virtual time: past it the simulation fails
    seed: int = 0
    trace: bool = True  # keep the event log
    ledger: Path | None = None  # write the real ledger there
    schedule: Path | None = None  # and what --record writes

    @property
    def slots(self) -> int:
        """Slots per engine that are in force."""
        return self.slots_per_engine or self.rollout.rollout_concurrency_per_engine
