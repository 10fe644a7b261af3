"""Addresses for other processes: this node's host, and ports that stay bound until they are used.

An address handed to another machine must mean something there (A6): the fully qualified name where it
resolves to something routable, else the IP of the interface that routes outwards. 127.0.0.1 only where Ray
has one node.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from miles_async.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
_LOWEST_PORT = 15000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL_START = 32768
_TRIES = 200
_random = random.SystemRandom()  # not seeded: two runs with one seed on one machine must not choose the same ports


def node_host(*, single_node: bool) -> str:
    """Return the name or IP under which other processes of the run reach this node."""
    if single_node:
        return LOOPBACK
    name = socket.getfqdn()
    with suppress(OSError):
        if not socket.gethostbyname(name).startswith("127."):
            return name
    return _outward_ip()


def _outward_ip() -> str:
    """Return the IP of the interface with the default route; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        except OSError as error:
            raise ConfigurationError(
                "expected an IP that other machines can reach, found no route outwards and no resolvable "
                "host name on this node; run on one node or fix its name resolution"
            ) from error
        return str(probe.getsockname()[0])


class HeldPort:
    """A free TCP port, bound by us until :meth:`release`, so that nobody else gets it meanwhile.

    Bound with SO_REUSEADDR and never listened on: on Linux a server that sets SO_REUSEADDR too (they all
    do) can listen on it while we hold it, so hold it until the server is up. Chosen below the kernel's
    ephemeral range, from which outgoing connections of other processes take theirs.

    >>> with HeldPort("127.0.0.1") as port:
    ...     start_server(port.number)
    ...     wait_until_it_listens()
    """

    def __init__(self, host: str, number: int | None = None) -> None:
        """``number``: this very port instead of a free one. Raises ConfigurationError if it is taken."""
        self._socket = _bind(host, number)
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> int:
        """Release the port and return its number."""
        self._socket.close()
        return self.number

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _bind(host: str, number: int | None) -> socket.socket:
    address = host if host == LOOPBACK else ""
    if number is not None:
        try:
            return _bound(address, number)
        except OSError as error:
            raise ConfigurationError(f"port {number} is not free: {error}; choose another, or none") from error
    lowest_ephemeral = _ephemeral_start()
    candidates = range(_LOWEST_PORT, lowest_ephemeral) if lowest_ephemeral > _LOWEST_PORT + 1000 else range(0, 1)
    for _ in range(_TRIES):
        with suppress(OSError):
            return _bound(address, _random.choice(candidates))
    raise ConfigurationError(f"no free port among {_TRIES} tried in [{candidates.start}, {candidates.stop})")


def _bound(address: str, number: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A listener that also set SO_REUSEADDR refuses us all the same: Linux shares only unlistened sockets.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, number))
    except OSError:
        holder.close()
        raise
    return holder


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_START
