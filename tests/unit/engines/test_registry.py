"""EngineRegistry: what requests ask of it after every change, and how those that wait are woken."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from miles_async.engines.registry import (
    MOST_WRONG_ANSWERS,
    WOKEN_AT_ONCE,
    WRONG_ANSWERS_WINDOW,
    EngineRecord,
    EngineRegistry,
    EngineState,
)
from tests.fakes.clients import registry_of, serving

ENGINES = 3

records = st.builds(
    dict,
    # Mostly serving and verified: else hardly any sequence would open the gate.
    state=st.sampled_from([EngineState.SERVING] * 4 + list(EngineState)),
    url=st.booleans(),
    paused=st.sampled_from([False, False, False, True]),
    verified=st.sampled_from([True, True, True, False]),
    on_trial=st.booleans(),
    version=st.none() | st.integers(0, 3),
)
changes = st.lists(st.tuples(st.integers(0, ENGINES - 1), records, st.sampled_from([True, True, True, False])))


def serving_of(registry: EngineRegistry) -> list[EngineRecord]:
    return [record for record in registry.engines.values() if record.state is EngineState.SERVING]


@given(changes)
def test_after_any_change_the_answers_are_those_of_looking_at_every_engine(
    sequence: list[tuple[int, dict, bool]],
) -> None:  # covers: C8
    registry = EngineRegistry()
    assert not registry.may_dispatch()
    version = registry.version
    for number, (index, fields, router_up) in enumerate(sequence):
        engine = f"engine-{index}"
        record = registry.engines.setdefault(engine, EngineRecord(engine_id=engine))
        # A restarted engine listens elsewhere.
        for name, value in {**fields, "url": f"http://{engine}:{number}" if fields["url"] else None}.items():
            setattr(record, name, value)
        registry.router_up = router_up
        registry.notify()

        here = serving_of(registry)
        taking = [r.url for r in here if r.url and (r.verified or r.on_trial) and not r.paused]
        assert registry.may_dispatch() is (router_up and bool(taking))
        assert not taking or [registry.pick_serving(n + len(taking)) for n in range(len(taking))] == taking
        version = min((r.version for r in here if r.version is not None), default=version)
        assert registry.version == version, "the oldest that may serve a request; as before while nobody serves"
        answering = [*here, *registry.in_state(EngineState.DRAINING)]
        urls = [f"http://engine-{i}:{n}" for i in range(ENGINES) for n in range(number + 1)]
        for url in [*urls, ""]:
            assert registry.answering_at(url) is next((r for r in answering if r.url == url), None)


def open_registry() -> tuple[EngineRegistry, EngineRecord]:
    record = serving("http://a")
    return registry_of(record), record


def pause(registry: EngineRegistry, record: EngineRecord, paused: bool) -> None:
    record.paused = paused
    registry.notify()


def test_an_engine_that_is_given_at_the_start_counts() -> None:
    registry, record = open_registry()
    assert registry.may_dispatch()
    assert registry.answering_at("http://a") is record


async def test_a_thousand_requests_that_wait_go_on_a_few_per_turn_of_the_loop() -> None:  # covers: C10
    registry, record = open_registry()
    pause(registry, record, True)
    went, turns = 0, []

    async def request() -> None:
        nonlocal went
        await registry.wait_until(registry.may_dispatch)
        went += 1

    async with asyncio.TaskGroup() as scope:
        for _ in range(1000):
            scope.create_task(request())
        await asyncio.sleep(0)
        pause(registry, record, False)
        while went < 1000:
            before = went
            await asyncio.sleep(0)
            turns.append(went - before)
    assert max(turns) == WOKEN_AT_ONCE


async def test_who_waits_for_something_else_does_not_hold_up_the_others() -> None:  # covers: C10
    registry, record = open_registry()
    async with asyncio.TaskGroup() as scope:
        others = [scope.create_task(registry.wait_until(lambda: False)) for _ in range(2 * WOKEN_AT_ONCE)]
        fenced = scope.create_task(registry.wait_until(lambda: record.incarnation == 1))
        await asyncio.sleep(0)
        record.incarnation = 1
        registry.notify()
        async with asyncio.timeout(50):
            await fenced
        for task in others:
            task.cancel()


async def test_who_stops_waiting_is_forgotten_and_the_rest_is_woken() -> None:  # covers: C10
    registry, record = open_registry()
    pause(registry, record, True)
    cancelled = asyncio.ensure_future(registry.wait_until(registry.may_dispatch))
    waiting = asyncio.ensure_future(registry.wait_until(registry.may_dispatch))
    await asyncio.sleep(0)
    pause(registry, record, False)
    cancelled.cancel()
    async with asyncio.timeout(50):
        await waiting
    assert cancelled.cancelled()
    assert registry._turns._waiting == {}


async def test_a_gate_that_closes_again_before_their_turn_lets_nobody_through() -> None:  # covers: C8
    registry, record = open_registry()
    pause(registry, record, True)
    task = asyncio.ensure_future(registry.wait_until(registry.may_dispatch))
    await asyncio.sleep(0)
    pause(registry, record, False)
    await asyncio.sleep(0)  # it is woken, and has not run yet
    pause(registry, record, True)
    await asyncio.sleep(0.01)
    assert not task.done()
    pause(registry, record, False)
    async with asyncio.timeout(50):
        await task


async def test_wrong_answers_that_come_hours_apart_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: A3
    registry, record = open_registry()
    seconds = 0.0
    monkeypatch.setattr("miles_async.engines.registry.now", lambda: seconds)
    for _ in range(3 * MOST_WRONG_ANSWERS):
        registry.note_wrong_answer(record, "too long")
        seconds += WRONG_ANSWERS_WINDOW / (MOST_WRONG_ANSWERS - 1)
        assert len(record.wrong_answers) < MOST_WRONG_ANSWERS
    assert record.reason == "", "it was not fenced"
