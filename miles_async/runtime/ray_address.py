"""The Ray cluster that a run joins: ``--ray-address``, else ``RAY_ADDRESS``; without either it starts its own."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from miles_async.arguments.cluster import ClusterArguments
from miles_async.errors import ConfigurationError

VARIABLE = "RAY_ADDRESS"  # set in Ray jobs, by KubeRay, and by those who read what `ray start` prints
_PROBE_SECONDS = 5.0


def with_ray_address(cluster: ClusterArguments) -> ClusterArguments:
    """Return the arguments with the address in force; None if the run starts a cluster of its own."""
    address = cluster.ray_address or os.environ.get(VARIABLE) or None
    return replace(cluster, ray_address=None if address == "local" else address)


def check_ray_address(address: str | None) -> None:
    """Raise ConfigurationError if no cluster answers there. Ray itself would try for two minutes."""
    if address is None or address == "auto":
        return
    advice = f"--ray-address {address} (or {VARIABLE}): expected host:port of a Ray cluster's head, "
    instead = "; give another one, or --ray-address local for a cluster of the run's own"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ConfigurationError(f"{advice}found something else{instead}")
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"{advice}and nothing answers there ({error}){instead}") from None
