"""A lost link to a living actor is waited for, a dead actor is not."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from ray.exceptions import ActorDiedError

from miles_async.errors import ProcessLostError
from miles_async.runtime.cluster import actor_link
from miles_async.runtime.cluster.actor_link import PATIENCE_SECONDS, ActorLink
from miles_async.runtime.cluster.call_once import CallId, CallOnce
from tests.fakes.lossy_ranks import STEP_SECONDS, Faults, lossy_ranks, unavailable
from tests.waiting import in_virtual_time

# covers: C10, A1


@in_virtual_time
async def test_an_actor_that_comes_back_costs_the_time_that_it_was_away() -> None:
    trainer, (one, other) = lossy_ranks(2, Faults(), random.Random(0))
    loop = asyncio.get_running_loop()
    started = loop.time()
    one.down = True  # the other has the call, and waits in the collective
    loop.call_later(60.0, setattr, one, "down", False)
    await trainer.train(["a", "b"])
    assert loop.time() - started < 60.0 + STEP_SECONDS + 3 * actor_link.RETRY_SECONDS
    assert one.did == ["train('a',)"]
    assert other.did == ["train('b',)"]


@in_virtual_time
async def test_an_actor_that_stays_away_is_lost_after_a_stated_time() -> None:
    trainer, (one, _) = lossy_ranks(2, Faults(), random.Random(0))
    loop = asyncio.get_running_loop()
    started = loop.time()
    one.down = True
    with pytest.raises(
        ProcessLostError, match=f"trainer rank 0 was out of reach for {PATIENCE_SECONDS:g} s: .*request"
    ):
        await trainer.train(["a", "b"])
    assert PATIENCE_SECONDS <= loop.time() - started < PATIENCE_SECONDS + 10


@in_virtual_time
async def test_a_dead_actor_is_not_called_again() -> None:
    trainer, (one, other) = lossy_ranks(2, Faults(), random.Random(0))
    one.dead = True
    with pytest.raises(ProcessLostError, match="trainer rank 0 died"):
        await trainer.train(["a", "b"])
    assert other.did == ["train('b',)"]


@in_virtual_time
async def test_a_reply_lost_with_its_connection_is_noticed_by_a_ping() -> None:
    trainer, ranks = lossy_ranks(1, Faults(reply_lost=1.0, noticed=0.0), random.Random(0))
    loop = asyncio.get_running_loop()
    loop.call_later(STEP_SECONDS + 1.0, setattr, ranks[0], "_faults", Faults())
    started = loop.time()
    await trainer.train(["a"])
    assert loop.time() - started < 2 * actor_link.PING_SECONDS
    assert ranks[0].did == ["train('a',)"]


@in_virtual_time
async def test_an_actor_that_answers_nothing_not_even_pings_is_lost() -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(100_000)

    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(ProcessLostError, match="rank was out of reach for 50 s: it answers no ping"):
        await ActorLink("rank", never, patience=50.0).call(never)
    assert loop.time() - started < 50.0 + 2 * actor_link.PING_SECONDS


@in_virtual_time
async def test_a_ping_whose_reply_is_lost_with_that_of_the_call_is_followed_by_another() -> None:
    """As a link that is down when both are answered loses them: only what is sent meets the broken connection."""
    broken = asyncio.Event()
    calls: list[CallId] = []
    pings = 0

    async def call(identity: CallId) -> str:
        calls.append(identity)
        if len(calls) > 1:
            return "done"
        await broken.wait()
        raise unavailable("the connection")

    async def ping() -> None:
        nonlocal pings
        pings += 1
        if pings == 1:
            await asyncio.sleep(100_000)
        broken.set()
        raise unavailable("the connection")

    loop = asyncio.get_running_loop()
    assert await ActorLink("rank", ping, patience=50.0).call(call) == "done"
    assert [each.number for each in calls] == [1, 1]
    assert loop.time() < 3 * actor_link.PING_SECONDS


@in_virtual_time
async def test_a_call_may_take_any_time_while_pings_are_answered() -> None:
    async def slow(_: CallId) -> str:
        await asyncio.sleep(10_000)
        return "done"

    async def pong() -> None:
        await asyncio.sleep(0.1)

    assert await ActorLink("rank", pong, patience=50.0).call(slow) == "done"


@in_virtual_time
async def test_times_out_of_reach_do_not_add_up() -> None:
    tries = iter([unavailable("a")] * 40 + [None] + [unavailable("b")] * 40 + [None])

    async def flaky(_: CallId) -> None:
        if (error := next(tries)) is not None:
            raise error

    link = ActorLink("rank", patience=50.0)
    await link.call(flaky)
    await link.call(flaky)
    assert next(tries, "over") == "over"


@in_virtual_time
async def test_death_is_told_at_once_though_a_ping_hangs() -> None:
    async def dies(_: CallId) -> None:
        await asyncio.sleep(20.0)
        raise ActorDiedError()

    loop = asyncio.get_running_loop()
    with pytest.raises(ActorDiedError):
        await ActorLink("rank", lambda: asyncio.sleep(1000.0)).call(dies)
    assert loop.time() < 25.0


async def test_a_call_that_is_cancelled_is_given_up() -> None:
    seen: list[CallId] = []

    async def note(call: CallId) -> None:
        seen.append(call)
        await asyncio.sleep(0.0 if len(seen) > 1 else 60.0)

    link = ActorLink("rank")
    first = asyncio.ensure_future(link.call(note))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    await link.call(note)
    assert seen == [CallId(1, frozenset({1})), CallId(2, frozenset({2}))]


def test_a_repetition_of_a_call_that_is_being_executed_waits_for_its_answer() -> None:
    once, begun, go = CallOnce(), threading.Event(), threading.Event()
    call, answers, did = CallId(1, frozenset({1})), list[object](), list[int]()

    def work() -> object:
        did.append(1)
        begun.set()
        assert go.wait(10)
        return object()

    callers = [threading.Thread(target=lambda: answers.append(once.run(call, work))) for _ in range(2)]
    callers[0].start()
    assert begun.wait(10)
    callers[1].start()
    go.set()
    for caller in callers:
        caller.join(10)
    assert did == [1]
    assert answers[0] is answers[1]


def test_answers_that_nobody_wants_any_more_are_forgotten() -> None:
    once = CallOnce()
    for number in range(1, 100):
        once.run(CallId(number, frozenset({1, number})), lambda: bytes(1000))
    assert sorted(once._answers) == [1, 99]


def test_an_error_is_answered_again_like_any_answer() -> None:
    once, call = CallOnce(), CallId(1, frozenset({1}))
    with pytest.raises(ZeroDivisionError):
        once.run(call, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        once.run(call, lambda: 1)
