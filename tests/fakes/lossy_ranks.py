"""Trainer ranks behind a transport that loses requests and replies, repeats requests late, and falls silent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from miles_async.runtime.cluster.call_once import CallId, CallOnce
from miles_async.trainer.actor import RankInfo
from miles_async.trainer.placement import RankResources
from miles_async.trainer.ranks import TrainerRanks
from miles_async.types import RankTimes

STEP_SECONDS = 3.0


class Collective:
    """What all ranks do together: each waits until the others do the same."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    async def join(self, what: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(what, []).append(mine)
        if len(self._waiting[what]) == self._ranks:
            for waiting in self._waiting.pop(what):
                waiting.set_result(None)
        await mine


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances, per call."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    noticed: float = 1.0  # that a lost reply is an error by itself, and not only by a ping
    repeated: float = 0.0  # that the request comes a second time, up to a minute later


class LossyRank:
    """Stands in for the Ray actor of a rank, as TrainerRanks calls it."""

    def __init__(self, number: int, collective: Collective, faults: Faults, chance: random.Random) -> None:
        self.did: list[str] = []
        self.down = False  # out of reach
        self.dead = False
        self._number = number
        self._collective = collective
        self._faults = faults
        self._chance = chance
        self._once = CallOnce()
        self._late: set[asyncio.Task[object]] = set()
        self._broken: list[asyncio.Future[None]] = []  # connections whose end nobody has noticed
        self.perform = _Method(self._perform)
        self.ping = _Method(self._ping)

    async def _perform(self, call: CallId, method: Callable[..., object], *arguments: object) -> object:
        await self._travel(self._faults.request_lost)
        if self._chance.random() < self._faults.repeated:
            self._late.add(asyncio.ensure_future(self._come_again(call, method, *arguments)))
        answer = await self._execute(call, method, *arguments)
        if self._chance.random() < self._faults.reply_lost:
            if self._chance.random() >= self._faults.noticed:
                broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._broken.append(broken)
                await broken
            raise unavailable("reply lost")
        return answer

    async def _ping(self) -> None:
        await self._travel(0.0)
        if self._broken:
            for broken in self._broken:
                broken.set_result(None)
            self._broken.clear()
            raise unavailable("connection reset")

    async def _travel(self, lost: float) -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 0.1))
        if self.dead:
            raise ActorDiedError()
        if self.down or self._chance.random() < lost:
            raise unavailable("request lost")

    async def _come_again(self, call: CallId, method: Callable[..., object], *arguments: object) -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 60.0))
        try:
            await self._execute(call, method, *arguments)
        except Exception:  # nobody waits for the answer
            pass

    async def _execute(self, call: CallId, method: Callable[..., object], *arguments: object) -> object:
        async def work() -> object:
            what = f"{method.__name__}{arguments}"
            self.did.append(what)
            await asyncio.sleep(STEP_SECONDS)
            await self._collective.join(f"{len(self.did)}: {method.__name__}")
            answer = f"rank {self._number}: {what}"
            match method.__name__:
                case "save":
                    return {answer: ""}  # digests by file
                case "train":
                    return answer, (), RankTimes(0.0, {})  # metrics, scores of tokens, and the step's parts
            return answer

        return await self._once.run_async(call, work)


class _Method:
    """A remote method: ``.remote(...)``, with options that change nothing."""

    def __init__(self, call: Callable[..., Awaitable[object]]) -> None:
        self.remote = call

    def options(self, **_: object) -> _Method:
        return self


def unavailable(reason: str) -> ActorUnavailableError:
    return ActorUnavailableError(reason, None)


def lossy_ranks(ranks: int, faults: Faults, chance: random.Random) -> tuple[TrainerRanks, list[LossyRank]]:
    """Ranks that have started, without Ray."""
    collective = Collective(ranks)
    actors = [LossyRank(number, collective, faults, chance) for number in range(ranks)]
    trainer = TrainerRanks(
        world_size=ranks, resources=RankResources(num_cpus=0, num_gpus=0), backend=_nothing, sender=_nothing
    )
    trainer._actors.kill = lambda: None  # type: ignore[method-assign]  # these are no actors of Ray's
    trainer._actors.connect(actors)
    trainer._ranks = [RankInfo(rank=rank, data_parallel_rank=rank, sender=None, pid=0) for rank in range(ranks)]
    return trainer, actors


def _nothing(**_: object) -> Any:
    raise AssertionError("nothing is started here")
