"""The store of an engine's ranks listens at its address only, and torch still has it listen on all interfaces."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from miles_async.engines.sglang.patches import narrow_rank_store
from miles_async.runtime.network.addresses import LOOPBACK
from miles_async.runtime.network.ports import HeldPort

torch_rendezvous: Any = import_module("torch.distributed.rendezvous")


@pytest.fixture
def port() -> Iterator[int]:
    """Held meanwhile, as by the parent of a server."""
    with HeldPort(LOOPBACK) as held:
        yield held.number


def meet(port: int, rank: int, ranks: int) -> TCPStore:
    url = f"tcp://{LOOPBACK}:{port}"
    store: TCPStore = next(torch_rendezvous.rendezvous(url, rank, ranks, timeout=timedelta(seconds=20)))[0]
    return store


def addresses_of(port: int) -> set[str]:
    """Where this process listens on ``port``, by IPv4 and IPv6."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


def test_ranks_meet_at_their_address_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C13
    monkeypatch.setattr(torch_rendezvous, "TCPStore", TCPStore)
    narrow_rank_store()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, (port, port), (0, 1), (2, 2))
    assert addresses_of(port) == {LOOPBACK}
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_torch_still_listens_on_all_interfaces(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rendezvous, "TCPStore", TCPStore)
    store = meet(port, 0, 1)
    assert addresses_of(port) in ({"::"}, {"0.0.0.0"})
    del store
