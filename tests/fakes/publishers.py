"""Publishers as tests and benchmarks put them together."""

from __future__ import annotations

from typing import Any

from miles_async.arguments import WeightsArguments
from miles_async.seams import EngineFleet, TrainerSide
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater


def publisher_of(
    trainer: TrainerSide,
    fleet: EngineFleet,
    arguments: WeightsArguments,
    *,
    apart: EngineFleet | None = None,
    **settings: Any,
) -> WeightPublisher:
    """A publisher on a CPU. ``apart``: engines that only evaluate. ``settings``: of each ``FleetUpdater``; by default
    the canary may differ by 1e-3.
    """

    def updater(name: str, of: EngineFleet, *, repair: bool = False) -> FleetUpdater:
        transport = make_transport(arguments, trainer, of, "cpu", name=name, repair=repair)
        return FleetUpdater(of, transport, arguments, **{"tolerance": 1e-3, **settings})

    evaluation = updater("evaluation", apart) if apart else None
    repairs = updater("repairs", fleet, repair=True)
    return WeightPublisher(trainer, updater("weights", fleet), arguments, repairs=repairs, evaluation=evaluation)
