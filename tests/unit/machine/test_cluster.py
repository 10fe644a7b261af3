"""Findings about nodes, with nodes that are objects of the test and sockets that are real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from miles_async.machine.checks import Intent
from miles_async.machine.cluster import Door, NodeProbe, nodes_findings
from miles_async.machine.finding import Finding
from miles_async.runtime.network.ports import HeldPort

FINE = Finding(check="disk", verdict="ok", found="room")


class LocalNode:
    """A node's probe, in this process; with faults."""

    def __init__(self, *, gone: bool = False, clock_ahead: float = 0.0, closed: Sequence[Door] = ()) -> None:
        self._probe = NodeProbe("127.0.0.1")
        self._gone = gone
        self._clock_ahead = clock_ahead
        self._closed = list(closed)

    async def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "findings":
            if self._gone:
                raise ConnectionError("No module named 'miles_async'")
            return [FINE]
        if method == "unreachable":
            return await asyncio.to_thread(self._probe.unreachable, [*arguments[0], *self._closed])
        found = getattr(self._probe, method)(*arguments)
        return found + self._clock_ahead if method == "clock" else found

    def close(self) -> None:
        for door in self._probe._listening:
            door.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., LocalNode]]:
    made: list[LocalNode] = []

    def make(**faults: object) -> LocalNode:
        made.append(node := LocalNode(**faults))
        return node

    yield make
    for node in made:
        node.close()


async def test_nodes_that_are_as_they_should_be(make_node: Callable[..., LocalNode]) -> None:
    found = await nodes_findings({"10.0.0.1": make_node(), "10.0.0.2": make_node()}, Intent())
    assert {address: [each.verdict for each in findings] for address, findings in found.items()} == {
        "10.0.0.1": ["ok"] * 3,
        "10.0.0.2": ["ok"] * 3,
    }
    assert found["10.0.0.2"][-1].found == "reaches all 2 nodes"


async def test_each_nodes_faults_are_its_own(make_node: Callable[..., LocalNode]) -> None:
    with HeldPort("127.0.0.1") as held:  # nobody listens
        nodes = {
            "gone": make_node(gone=True),
            "late": make_node(clock_ahead=-300.0),
            "behind a wall": make_node(closed=[("127.0.0.1", held.number)]),
        }
        found = await nodes_findings(nodes, Intent())
        wall = f"does not reach 127.0.0.1:{held.number} ("
    [silent] = found["gone"]
    assert (silent.check, silent.verdict) == ("node", "failure")
    assert "No module named 'miles_async'" in silent.found
    assert [each.verdict for each in found["late"]] == ["ok", "warning", "ok"]
    assert found["late"][1].found.startswith("300 s behind that of this machine")
    assert [each.verdict for each in found["behind a wall"]] == ["ok", "ok", "failure"]
    assert found["behind a wall"][2].found.startswith(wall)


async def test_a_node_without_a_free_port_is_told(make_node: Callable[..., LocalNode]) -> None:
    with HeldPort("127.0.0.1") as held:
        taken = range(held.number, held.number + 1)
        found = await nodes_findings({"full": make_node()}, Intent(ports=taken))
    assert "no free port" in found["full"][2].found
    assert found["full"][2].verdict == "failure"
