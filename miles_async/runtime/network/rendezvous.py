"""Rendezvous of torch process groups: stores that listen at one address of this node only."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from miles_async.runtime.network.ports import bind_port

_TIMEOUT = datetime.timedelta(seconds=300)  # of an operation, torch's default


def open_store(
    address: str, ports: range | None, world_size: int | None = None, timeout: datetime.timedelta = _TIMEOUT
) -> dist.TCPStore:
    """Listen at ``address``, on one of ``ports`` that is bound from now on. Returns without waiting for others."""
    listener = bind_port(address, ports)
    number = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        number,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself it would listen on all interfaces
    )
