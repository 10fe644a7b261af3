"""Ports that stay bound from their choice until a server listens on them."""

from __future__ import annotations

import random
import socket

import pytest

from miles_async.errors import ConfigurationError
from miles_async.runtime.network import ports
from miles_async.runtime.network.addresses import LOOPBACK
from miles_async.runtime.network.ports import HeldPort, bind_port


def test_a_held_port_is_ours_until_released() -> None:
    with HeldPort(LOOPBACK) as port:
        stranger = socket.socket()
        with pytest.raises(OSError, match="in use"):
            stranger.bind((LOOPBACK, port.number))
        stranger.close()
    with socket.create_server((LOOPBACK, port.number)):
        pass


def test_a_server_can_listen_on_a_port_that_we_still_hold() -> None:
    """So a run can hold it until an engine is up; create_server sets SO_REUSEADDR as servers do."""
    with HeldPort(LOOPBACK) as port, socket.create_server((LOOPBACK, port.number)) as server:
        server.listen()


def test_held_ports_are_outside_the_ephemeral_range() -> None:
    with HeldPort(LOOPBACK) as port:
        assert port.number < ports._default_ports().stop


def test_processes_with_the_same_seed_hold_different_ports() -> None:
    """Megatron seeds Python's generator; a port that two processes hold would be either's to listen on."""
    held = []
    for _ in range(2):
        random.seed(1234)
        with HeldPort(LOOPBACK) as port, HeldPort(LOOPBACK) as another:
            held.append((port.number, another.number))
    assert held[0] != held[1]


def test_a_wanted_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number} is not free"):
            HeldPort(LOOPBACK, number)


def test_ports_above_one_are_held_with_it_and_once() -> None:
    with HeldPort(LOOPBACK, above=(1, 2)) as free:
        among = range(free.number, free.number + 3)
    with HeldPort(LOOPBACK, ports=among, above=(1, 2)) as held:
        assert held.number == among[0]
        for number in among:
            with pytest.raises(ConfigurationError, match="no free port"):
                bind_port(LOOPBACK, range(number, number + 1))
            with socket.create_server((LOOPBACK, number)):  # the server that they are held for
                pass
    with pytest.raises(ConfigurationError, match=r"no free port among .* with the ports above that it needs: give a"):
        HeldPort(LOOPBACK, ports=among, above=(1, 13))
    for number in among:
        bind_port(LOOPBACK, range(number, number + 1)).close()  # nothing of it is left


def test_ports_are_taken_from_the_range_and_each_once() -> None:
    """A range is as narrow as a firewall allows, so two holders must not choose the same port."""
    with HeldPort(LOOPBACK) as free:
        start = free.number
    among = range(start, start + 3)
    holders = [HeldPort(LOOPBACK, ports=among) for _ in among]
    try:
        assert sorted(holder.number for holder in holders) == list(among)
        for take in (bind_port, HeldPort):
            with pytest.raises(ConfigurationError, match=rf"no free port among {start}-{start + 2}.*--port-range"):
                take(LOOPBACK, ports=among)
    finally:
        for holder in holders:
            holder.release()
