"""A few per turn of the loop, in order, whoever stops waiting."""

from __future__ import annotations

import asyncio

from miles_async.runtime.loop_turns import LoopTurns


async def test_a_thousand_go_on_a_few_per_turn_and_in_order() -> None:  # covers: C10
    turns, went, per_turn = LoopTurns(8), [], []

    async def work(number: int) -> None:
        await turns.turn()
        went.append(number)

    async with asyncio.TaskGroup() as scope:
        tasks = [scope.create_task(work(number)) for number in range(1000)]
        for number in range(100, 200):
            tasks[number].cancel()
        while len(went) < 900:
            before = len(went)
            await asyncio.sleep(0)
            per_turn.append(len(went) - before)
    assert went == [*range(100), *range(200, 1000)]
    assert max(per_turn) <= 8
    assert len(per_turn) <= 900 / 8 + 3, "and no turn goes by unused"


async def test_who_is_alone_does_not_wait() -> None:
    turns = LoopTurns(1)
    for _ in range(3):
        waiting = asyncio.ensure_future(turns.turn())
        await asyncio.sleep(0)
        assert waiting.done()
        await asyncio.sleep(0)
