"""Limits of the system on connections: open files of a process, and ports of connections to one address."""

from __future__ import annotations

import resource
from pathlib import Path

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST = 1 << 20  # more only costs programs that go through all of them
_OTHER_FILES = 500  # of the process with most connections


def allow_open_files() -> None:
    """Raise the limit of this process and its children as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connection_limits(in_flight: int) -> list[str]:
    """Limits of this machine that so many requests at once through one router exceed; one line each.

    The router has two connections for each, one from the rollout process and one to the engine.
    """
    problems = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * in_flight + _OTHER_FILES
    if hard not in (resource.RLIM_INFINITY, -1) and hard < needed:
        problems.append(f"{needed} open files of the router, and a process here may have {hard} (`ulimit -Hn`)")
    first, last = map(int, _PORTS.read_text().split())
    if (ports := last - first + 1) < in_flight:
        problems.append(f"{in_flight} ports for connections to the router, and {_PORTS} has {ports}")
    return problems
