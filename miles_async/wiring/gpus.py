"""GPU sharing between trainer and engines: each has its own, or both take turns on the same (``--colocate``).

In turns::

    engines   ── generate ──┐ released              ┌── take weights, generate ──┐ released
    trainer        on host  └── train, copy, save ──┘ on host                    └── train ...

The trainer's weights are copied to host memory, so it leaves before engines come back to take them, and the two never
need room at the same time. What engines held is lost with their memory: the publication brings all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import DEFAULT_GROUP
from miles_async.engines.placement import EnginePlace
from miles_async.errors import EngineError
from miles_async.runtime.tasks import gathered
from miles_async.seams import EngineErrors, EngineFleet, InferenceServer, NoTurns
from miles_async.trainer.ranks import TrainerRanks
from miles_async.types import Incarnation

Start = Callable[[], Coroutine[object, object, None]]


class OwnGpus(NoTurns):
    """Each side has its own GPUs, so neither waits for the other."""

    async def start(self, *sides: Start) -> None:
        await gathered(*(start() for start in sides))


class SharedGpus:
    """Both sides have the same GPUs, one at a time; implements ``seams.Gpus``. The trainer has the first turn."""

    def __init__(self, fleet: EngineFleet, trainer: TrainerRanks) -> None:
        self._fleet = fleet
        self._trainer = trainer
        self._engines_have_them = True
        self._trainer_is_through = asyncio.Event()

    async def start(self, *sides: Start) -> None:
        """Start engines first: they size their memory by the free memory."""
        engines, trainer = sides
        await engines()
        await self._release()
        await trainer()

    async def for_training(self, evaluation: Awaitable[None] | None) -> None:
        self._trainer_is_through.clear()
        if evaluation is not None:
            await evaluation
        if self._engines_have_them:
            await self._release()
            await self._trainer.onload()

    def training_is_over(self) -> None:
        self._trainer_is_through.set()

    async def for_generating(self) -> None:
        await self._trainer_is_through.wait()
        if self._engines_have_them:
            return
        await self._trainer.offload()
        self._engines_have_them = True
        errors = await self._fleet.call(await self._engines(), InferenceServer.retake_memory)
        for engine, error in errors.items():
            if error is not None:
                await self._fleet.fence([engine], f"GPU memory: {error}")

    async def _release(self) -> None:
        """Raises EngineError if an engine keeps its memory, which leaves the trainer no room."""
        engines = await self._engines()
        await self._check(await self._fleet.call(engines, InferenceServer.pause, "retract"))
        await self._check(await self._fleet.call(engines, InferenceServer.release_memory))
        self._engines_have_them = False

    async def _check(self, errors: EngineErrors) -> None:
        """Raise the first error of an engine that still runs: one that was lost has no memory either."""
        if not any(errors.values()):
            return
        for engine in await self._engines():
            if error := errors.get(engine):
                raise EngineError(f"--colocate: {engine} does not release its GPU: {error}") from error

    async def _engines(self) -> Sequence[Incarnation]:
        members = await self._fleet.members()
        return (*members.serving, *members.joining)


RunGpus = OwnGpus | SharedGpus


def shared_places(arguments: Arguments, locations: Sequence[tuple[str, str]]) -> dict[str, tuple[EnginePlace, ...]]:
    """The engines' places on the GPUs of the trainer's ranks. ``locations``: node and GPU of each rank; those of a node
    follow each other.

    An engine has the GPUs of consecutive ranks of one node, or, with ``--rollout-num-nodes-per-engine``, as many on
    each of consecutive nodes. On one node, each sees the first rank's GPU as well, where weights may come from
    (``--weight-transport ipc``); SGLang's ranks take the first ones that they see.
    """
    cluster = arguments.cluster
    gpus: dict[str, list[str]] = {}
    for node, gpu in locations:
        gpus.setdefault(node, []).append(gpu)
    spread = cluster.rollout_num_nodes_per_engine
    share = cluster.rollout_num_gpus_per_engine // spread
    from_files = arguments.weights.weight_transport in ("disk", "object_store")
    sender = [] if from_files or len(gpus) > 1 else [locations[0][1]]
    nodes, places = [*gpus], []
    for start in range(0, len(nodes) - spread + 1, spread):
        some = nodes[start : start + spread]
        for first in range(0, len(gpus[some[0]]) - share + 1, share):
            own = tuple(tuple(dict.fromkeys([*gpus[node][first : first + share], *sender])) for node in some)
            places.append(EnginePlace(node_ids=tuple(some), gpus=own))
    return {DEFAULT_GROUP: tuple(places[: cluster.num_engines])}
