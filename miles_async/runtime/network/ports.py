"""TCP ports that stay bound from their choice until they are used."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from miles_async.errors import ConfigurationError

_LOWEST_PORT = 15000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 200
_random = random.SystemRandom()  # not seeded: two runs with one seed on one machine must not choose the same ports


def bind_port(address: str, ports: range | None = None) -> socket.socket:
    """Bind a free port of ``address``, which no other call of this function gets meanwhile. Not listening yet.

    ``ports``: to choose from (--port-range). By default they are below the kernel's ephemeral range, from which
    outgoing connections of other processes take theirs. Raises ConfigurationError if none is free.
    """
    return _bind_ports(address, ports, ())[0]


def _bind_ports(address: str, ports: range | None, above: Sequence[int]) -> list[socket.socket]:
    """Like :func:`bind_port`, with the ports that are ``above`` the first one by so much."""
    candidates = ports or _default_ports()
    for number in _random.sample(candidates, min(_TRIES, len(candidates))):
        with ExitStack() as stack, suppress(OSError, OverflowError):
            bound = [stack.enter_context(_bound(address, number))]
            first = bound[0].getsockname()[1]
            if ports is None or all(first + distance in ports for distance in above):
                bound += [stack.enter_context(_bound(address, first + distance)) for distance in above]
                stack.pop_all()
                return bound
    ends = f"{candidates[0]}-{candidates[-1]}"
    raise ConfigurationError(
        f"{address} has no free port among {ends}{' with the ports above that it needs' if above else ''}: give a "
        "wider --port-range, or another one"
    )


def bind_held_port(address: str, number: int) -> socket.socket:
    """Bind this very port, which a :class:`HeldPort`, or connections of its last owner, may have. Not listening yet.

    Raises OSError if another process listens on it or does not share it.
    """
    return _bound(address, number, reuse=True)


class HeldPort:
    """A free TCP port, kept bound until :meth:`release`, so that no other process takes it.

    Never listened on: on Linux a server that sets SO_REUSEADDR (they all do) can listen on it while we hold it, so hold
    it until the server is up.

    >>> with HeldPort("127.0.0.1") as port:
    ...     start_server(port.number)
    ...     wait_until_it_listens()
    """

    def __init__(
        self, address: str, number: int | None = None, *, ports: range | None = None, above: Sequence[int] = ()
    ) -> None:
        """``number``: this very port instead of a free one of ``ports``. ``above``: distances from a free one to others
        that are held with it. Raises ConfigurationError if they are taken.
        """
        if number is None:
            self._sockets = _bind_ports(address, ports, above)
            for each in self._sockets:
                # Set after binding: it lets the server in, and still keeps out sockets that bind without it, as above.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            try:
                self._sockets = [bind_held_port(address, number)]
            except OSError as error:
                raise ConfigurationError(f"port {number} is not free: {error}; choose another, or none") from error
        self.number = int(self._sockets[0].getsockname()[1])

    def release(self) -> None:
        """Release the port, and those above it."""
        for each in self._sockets:
            each.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _bound(address: str, number: int, *, reuse: bool = False) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A listener that also set SO_REUSEADDR refuses us all the same: Linux shares only unlistened sockets.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        bound.bind((address, number))
    except OSError:
        bound.close()
        raise
    return bound


def _default_ports() -> range:
    lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    # 0: one of the kernel's choice.
    return range(_LOWEST_PORT, lowest_ephemeral) if lowest_ephemeral > _LOWEST_PORT + 1000 else range(1)
