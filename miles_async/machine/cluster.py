"""Checks of a Ray cluster: each node as a machine, clocks, and whether nodes reach each other.

Nodes are asked by one actor each, which takes no resource of the cluster. A node that does not answer is a finding.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from miles_async.machine.checks import Intent, machine_findings
from miles_async.machine.finding import Finding
from miles_async.machine.network import clock_finding
from miles_async.runtime.cluster.nodes import alive_nodes
from miles_async.runtime.network.ports import bind_port

NODE_SECONDS = 60.0  # for an actor to start on a node, import torch and answer
CONNECT_SECONDS = 5.0

Door = tuple[str, int]
"""Address and port at which a node listens."""

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of a node's :class:`NodeProbe` by its name, with arguments."""


class NodeProbe:
    """Looks at the node on which it runs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listening: list[socket.socket] = []

    def findings(self, intent: Intent) -> list[Finding]:
        return list(machine_findings(intent))

    def clock(self) -> float:
        return time.time()

    def listen(self, ports: range | None) -> Door:
        """Listen as a run's servers would. Raises ConfigurationError if no port is free."""
        door = bind_port(self._address, ports)
        door.listen()
        self._listening.append(door)
        return self._address, int(door.getsockname()[1])

    def unreachable(self, doors: Sequence[Door]) -> list[str]:
        """Try to connect; return the doors that stay closed, with the reason."""
        problems = []
        for address, port in doors:
            try:
                socket.create_connection((address, port), CONNECT_SECONDS).close()
            except OSError as error:
                problems.append(f"{address}:{port} ({error})")
        return problems


async def cluster_findings(intent: Intent) -> dict[str, list[Finding]]:
    """Check the cluster that this process has joined; returns findings by the node's address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes: dict[str, Ask] = {}
    for node in alive_nodes():
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=there).remote(node.address)
        nodes[node.address] = partial(_ask, actor)
    return await nodes_findings(nodes, intent)


async def _ask(actor: Any, method: str, *arguments: object) -> Any:  # Ray's handles have no types
    return await getattr(actor, method).remote(*arguments)


async def nodes_findings(nodes: Mapping[str, Ask], intent: Intent) -> dict[str, list[Finding]]:
    """Check each node by itself, then clocks, then all pairs. ``nodes``: by address."""
    own = await _all({address: node("findings", intent) for address, node in nodes.items()})
    found = {address: [_silent(each)] if isinstance(each, str) else list(each) for address, each in own.items()}
    alive = {address: node for address, node in nodes.items() if not isinstance(own[address], str)}
    for address, node in alive.items():  # one after another: the time of the call is what the comparison is off by
        before = time.time()
        clock = (await _all({address: node("clock")}))[address]
        if not isinstance(clock, str):
            found[address].append(clock_finding((before + time.time()) / 2 - clock, "that of this machine"))
    doors = await _all({address: node("listen", intent.ports) for address, node in alive.items()})
    opened = [door for door in doors.values() if not isinstance(door, str)]
    closed = await _all({address: node("unreachable", opened) for address, node in alive.items()})
    for address in alive:
        found[address] += [_silent(each[address]) for each in (doors, closed) if isinstance(each[address], str)]
        if isinstance(problems := closed[address], list):
            found[address].append(_reach(problems, len(opened)))
    return found


def _reach(closed: list[str], doors: int) -> Finding:
    if not closed:
        return Finding(check="reach", verdict="ok", found=f"reaches all {doors} nodes")
    return Finding(
        check="reach",
        verdict="failure",
        found=f"does not reach {', '.join(closed)}",
        mend="ufw allow from <node>, on each node for the others; --port-range LOW-HIGH makes it fewer ports",
    )


def _silent(reason: object) -> Finding:
    mend = "ray status; the project has to be installed there under the same path"
    return Finding(check="node", verdict="failure", found=f"does not answer: {reason}", mend=mend)


async def _all[T](calls: Mapping[str, Awaitable[T]]) -> dict[str, T | str]:
    """Await all; the reason where one fails."""

    async def one(call: Awaitable[T]) -> T | str:
        try:
            async with asyncio.timeout(NODE_SECONDS):
                return await call
        except TimeoutError:
            return f"nothing within {NODE_SECONDS:g} s"
        except Exception as error:  # supervision point: Ray raises what it likes, and a finding says so
            return " ".join(str(error).split())[-300:]

    return dict(zip(calls, await asyncio.gather(*map(one, calls.values())), strict=True))
