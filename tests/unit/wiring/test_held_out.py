"""Rewards of a run and of its held-out data sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_async.arguments import Arguments
from miles_async.runtime.services import Services
from miles_async.wiring import held_out
from miles_async.wiring.held_out import RunRewards
from tests.unit.arguments.test_live import BASE


class Reward:
    def __init__(self, name: str | None, closed: list[str | None]) -> None:
        self.name, self.closed = name, closed

    async def close(self) -> None:
        self.closed.append(self.name)
        if self.name == "math":
            raise OSError("its process is gone")


async def test_a_reward_that_cannot_be_closed_does_not_keep_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str | None] = []

    def resolve(arguments: Arguments, services: Services) -> Reward:
        return Reward(arguments.rewards.rm_type, closed)

    monkeypatch.setattr(held_out, "resolve_run_reward", resolve)
    rewards = RunRewards(replace(BASE, rewards=replace(BASE.rewards, rm_type="f1")), Services())
    for name in ("math", "dapo"):
        rewards.of(replace(BASE.rewards, rm_type=name))
    with pytest.raises(OSError, match="its process is gone"):
        await rewards.close()
    assert sorted(map(str, closed)) == ["dapo", "f1", "math"]
