"""In the server's process: the store at which its ranks meet listens at the address that they are given.

torch (2.13) has the store of ``tcp://`` listen on all interfaces, and it asks for no key.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.distributed import TCPStore

from miles_async.runtime.network.ports import bind_held_port


def register() -> None:
    """Patch all stores that this process and those that it forks create."""
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
    rendezvous.TCPStore = _listening_at_its_address


def _listening_at_its_address(*, host_name: str, port: int, is_master: bool, **options: Any) -> TCPStore:
    if is_master:
        options["master_listen_fd"] = bind_held_port(host_name, port).detach()
    return TCPStore(host_name=host_name, port=port, is_master=is_master, **options)
