"""A service that is down: one pause of its work, told once, charged to nobody, with an end.

# covers: C6, C10
"""

from __future__ import annotations

import asyncio
import math
import urllib.error
from collections.abc import Awaitable
from email.message import Message
from types import SimpleNamespace
from unittest.mock import Mock

import aiohttp
import pytest
import structlog

from miles_async.errors import (
    OverdueError,
    RewardError,
    ServiceOutageError,
    ServiceUnavailableError,
    TransientEngineError,
)
from miles_async.runtime.clock import now
from miles_async.runtime.services import MAX_OVERDUE, Circuit, Services, is_outage
from tests.waiting import in_virtual_time


class Service:
    """Down between two moments; counts its calls."""

    def __init__(self, down_from: float = 0.0, down_until: float = 0.0, seconds: float = 0.1) -> None:
        self.down_from, self.down_until, self.seconds = down_from, down_until, seconds
        self.calls: list[float] = []

    async def __call__(self) -> float:
        self.calls.append(now())
        await asyncio.sleep(self.seconds)
        if self.down_from <= now() < self.down_until:
            raise ConnectionRefusedError("nobody listens")
        return now()


@in_virtual_time
async def test_an_outage_is_one_pause_told_once_in_which_one_call_at_a_time_looks() -> None:
    service, services = Service(10.0, 40.0), Services(outage_timeout=600.0)
    circuit = services.circuit("http://reward")

    async def steady(index: int) -> float:
        await asyncio.sleep(index * 0.1)
        return await circuit.call(service)

    with structlog.testing.capture_logs() as logs:
        ends = await asyncio.gather(*(steady(index) for index in range(400)))
    assert [entry["event"] for entry in logs] == ["service is down, its work waits", "service is back"]
    assert all(end < 10.2 or end >= 40.0 for end in ends)
    assert max(ends) < 40.0 + 5.0 * 1.5 + 1.0  # soon after it is back
    during = [at for at in service.calls if 12.0 < at < 40.0]
    assert len(during) < 15, "a pause, not thousands of tries"
    assert services.gauges() == {
        "services_down": 0,
        "service_failures": len(service.calls) - 400,
        "service_outage_seconds": pytest.approx(circuit.outage_seconds),
    }
    assert 25.0 < circuit.outage_seconds < 60.0
    assert 40.0 <= services.paused_until() < 50.0


@in_virtual_time
async def test_an_outage_without_end_is_an_error_that_names_the_service() -> None:
    services = Services(outage_timeout=300.0)
    circuit = services.circuit("--custom-rm-path mine:reward")
    paused = [services.paused_until()]
    asyncio.get_running_loop().call_later(100.0, lambda: paused.append(services.paused_until()))
    with pytest.raises(ServiceOutageError) as caught:
        await circuit.call(Service(0.0, 1e9))
    assert 300.0 < now() < 300.0 + 2 * 15.0 * 1.5  # it may be waiting in its own backoff, and then at the door
    for words in ("--custom-rm-path mine:reward", "within 300 s (--service-outage-timeout)", "nobody listens"):
        assert words in str(caught.value)
    assert services.gauges()["services_down"] == 1
    assert paused == [-math.inf, 100.0]
    assert 300.0 <= services.paused_until() < 310.0  # no longer than it may: then the stall timeout is in force again
    [line] = services.describe()
    assert "--custom-rm-path mine:reward has been down for" in line


@in_virtual_time
async def test_a_call_that_fails_while_others_are_answered_has_itself_to_blame() -> None:
    circuit = Circuit("service", max_failures=3)
    poisoned = 0

    async def poison() -> None:
        nonlocal poisoned
        poisoned += 1
        await asyncio.sleep(1.0)
        raise ConnectionResetError("died of it")

    async def others() -> None:
        fine = Service()
        while not done.is_set():
            await circuit.call(fine)

    done = asyncio.Event()
    async with asyncio.TaskGroup() as scope:
        scope.create_task(others())
        with pytest.raises(ServiceUnavailableError, match=r"service: ConnectionResetError\('died of it'\)"):
            await circuit.call(poison)
        done.set()
    assert poisoned == 4
    assert not circuit.is_open


@in_virtual_time
async def test_a_missed_deadline_is_the_calls_own_if_others_are_answered_and_the_services_if_not() -> None:
    tries = 0

    async def late() -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(1.0)
        raise OverdueError("longer than --reward-timeout")

    for others_are_answered, expected in ((True, 1), (False, MAX_OVERDUE)):
        circuit, tries = Circuit("service"), 0
        other = asyncio.ensure_future(asyncio.sleep(0))
        if others_are_answered:
            other = asyncio.ensure_future(circuit.call(Service(seconds=0.5)))
        with pytest.raises(ServiceUnavailableError, match="longer than --reward-timeout") as caught:
            await circuit.call(late)
        assert isinstance(caught.value, OverdueError) is not others_are_answered  # whose fault it is cannot be told
        await other
        assert tries == expected


@in_virtual_time
async def test_failures_of_calls_from_before_the_outage_ended_open_nothing() -> None:
    circuit = Circuit("service")
    hangs = Service(0.0, 61.0, seconds=60.0)
    slow = [asyncio.ensure_future(circuit.call(hangs)) for _ in range(8)]
    await asyncio.sleep(50.0)
    await circuit.call(Service())  # back
    with structlog.testing.capture_logs() as logs:
        await asyncio.gather(*slow)
    assert circuit.failures == 8
    assert not logs


@in_virtual_time
async def test_a_service_that_nobody_needed_for_long_is_tried_before_the_run_ends() -> None:
    circuit = Circuit("service", outage_timeout=100.0)

    async def late() -> None:
        raise OverdueError("late")

    with pytest.raises(ServiceUnavailableError):
        await circuit.call(late)
    assert circuit.is_open
    await asyncio.sleep(1000.0)
    assert await circuit.call(Service()) == now()


@in_virtual_time
async def test_who_waits_for_a_service_can_be_cancelled() -> None:
    circuit = Circuit("service")
    waiting = [asyncio.ensure_future(circuit.call(Service(0.0, 100.0))) for _ in range(8)]
    await asyncio.sleep(20.0)
    for task in waiting[:6]:
        task.cancel()
    assert await asyncio.gather(*waiting[:6], return_exceptions=True)
    assert min(await asyncio.gather(*waiting[6:])) >= 100.0


@in_virtual_time
async def test_errors_that_are_no_outage_are_raised_at_once() -> None:
    async def wrong() -> Awaitable[None]:
        raise RewardError("no label")

    with pytest.raises(RewardError, match="no label"):
        await Circuit("service").call(wrong)
    assert now() == 0.0


def chained(outer: Exception, inner: Exception) -> Exception:
    try:
        raise outer from inner
    except Exception as error:
        return error


class RequestsError(OSError):
    """As ``raise_for_status`` of requests makes it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError("no route to host"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (ServiceUnavailableError("503"), True),
        (chained(RuntimeError("client"), ConnectionResetError()), True),
        (FileNotFoundError("tests.json"), False),
        (RequestsError(503), True),
        (RequestsError(429), True),
        (RequestsError(422), False),
        (chained(RuntimeError("client"), RequestsError(422)), False),
        (urllib.error.HTTPError("http://reward", 502, "bad gateway", Message(), None), True),
        (urllib.error.HTTPError("http://reward", 400, "bad request", Message(), None), False),
        (aiohttp.ClientResponseError(Mock(), (), status=503), True),
        (aiohttp.ClientResponseError(Mock(), (), status=404), False),
        (KeyError("answer"), False),
        (RewardError("no label"), False),
        (chained(TransientEngineError("engine"), ConnectionResetError()), False),  # engines have a budget of their own
    ],
)
def test_outages_are_told_from_errors(error: Exception, expected: bool) -> None:
    assert is_outage(error) == expected
