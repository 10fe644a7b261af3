"""A real Ray actor whose connections are cut while it works: what Ray raises, and that no call is executed twice.

The contract of ``fakes/lossy_ranks.py``: a lost connection to a living actor is ActorUnavailableError, the end of its
process is ActorDiedError, and an answer that was lost comes when the call is repeated.

# covers: C10, A1
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from miles_async.runtime.cluster.actor_link import ActorLink
from miles_async.runtime.cluster.call_once import CallId, CallOnce

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(
        "local",  # not what another test has started
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    )
    yield
    ray.shutdown()


class Worker:
    def __init__(self) -> None:
        self._once = CallOnce()
        self._did: list[int] = []

    def perform(self, call: CallId, number: int, seconds: float, cut_after: float | None) -> tuple[int, list[int]]:
        def work() -> tuple[int, list[int]]:
            cut = None if cut_after is None else threading.Timer(cut_after, _cut_connections)
            if cut is not None:
                cut.start()
            time.sleep(seconds)
            if cut is not None and cut_after < seconds:
                cut.join()  # else on a slow machine it would come later
            self._did.append(number)
            return os.getpid(), list(self._did)

        return self._once.run(call, work)

    @ray.method(concurrency_group="pings")
    def ping(self) -> None: ...


def _cut_connections() -> None:
    """End every connection that somebody made to this process, as a router on the way might."""
    process = psutil.Process()
    connections = process.net_connections("tcp")
    ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    for each in connections:
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports:
            with socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def worker() -> Any:
    return ray.remote(concurrency_groups={"pings": 1})(Worker).options(num_cpus=0).remote()


async def _perform(actor: Any, call: CallId, *, number: int, cut_after: float) -> tuple[int, list[int]]:
    return await actor.perform.remote(call, number, 0.5, cut_after)


async def test_a_cut_connection_is_out_of_reach_and_not_death() -> None:
    actor = worker()
    with pytest.raises(ActorUnavailableError):
        await actor.perform.remote(CallId(1, frozenset({1})), 1, 1.0, 0.3)
    _, did = await actor.perform.remote(CallId(1, frozenset({1})), 1, 1.0, None)  # a repetition
    assert did == [1]
    ray.kill(actor)


async def test_calls_go_on_over_cut_connections_each_executed_once() -> None:
    actor = worker()
    link = ActorLink("worker", actor.ping.remote)
    for number in range(1, 6):
        # Cut while it works, and where number is even after it has answered.
        cut = 0.2 if number % 2 else 0.5
        _, did = await link.call(partial(_perform, actor, number=number, cut_after=cut))
        assert did == list(range(1, number + 1))
    ray.kill(actor)


async def test_a_killed_actor_is_dead_though_it_was_called_over_a_link() -> None:
    actor = worker()
    link = ActorLink("worker", actor.ping.remote)
    pid, _ = await link.call(lambda call: actor.perform.remote(call, 1, 0.0, None))
    working = asyncio.ensure_future(link.call(lambda call: actor.perform.remote(call, 2, 60.0, None)))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(ActorDiedError):
        await working
    assert time.monotonic() - killed < 20


async def test_an_actor_that_is_stopped_for_a_while_costs_that_while() -> None:
    actor = worker()
    link = ActorLink("worker", actor.ping.remote)
    pid, _ = await link.call(lambda call: actor.perform.remote(call, 1, 0.0, None))
    os.kill(pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(3.0, os.kill, pid, signal.SIGCONT)
    started = time.monotonic()
    _, did = await link.call(lambda call: actor.perform.remote(call, 2, 0.0, None))
    assert did == [1, 2]
    assert 2.5 < time.monotonic() - started < 20.0
    ray.kill(actor)
