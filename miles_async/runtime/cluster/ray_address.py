"""The Ray cluster that a run joins: ``--ray-address``, else ``RAY_ADDRESS``; without either it starts its own."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Literal

from miles_async.arguments.cluster import ClusterArguments
from miles_async.errors import ConfigurationError

VARIABLE = "RAY_ADDRESS"  # set in Ray jobs, by KubeRay, and by users as `ray start` suggests
TOKEN_MODE = "RAY_AUTH_MODE"  # "token": Ray sends its token to the cluster
_PROBE_SECONDS = 5.0
_PING = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # of Ray 2.60's head

Entry = Literal["open", "token"]


def with_ray_address(cluster: ClusterArguments) -> ClusterArguments:
    """Return the arguments with the address in force; None if the run starts its own cluster."""
    address = cluster.ray_address or os.environ.get(VARIABLE) or None
    return replace(cluster, ray_address=None if address == "local" else address)


def check_ray_address(address: str | None) -> None:
    """Raise ConfigurationError if no cluster answers there, or not to us. Ray itself would try for two minutes."""
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
    find_entry(address)


def find_entry(address: str) -> Entry:
    """Find out whether the cluster wants a token, as `ray start` makes by default, and accepts this machine's. A token
    is sent only to a cluster that wants one.

    Raises ConfigurationError if it wants one that we don't have.
    """
    if not _refuses(address, None):
        return "open"
    token, place = _token()
    if token and not _refuses(address, token):
        return "token"
    found = f"refuses the one in {place}" if token else f"there is none in {place}"
    raise ConfigurationError(
        f"--ray-address {address}: the cluster wants a token, and {found}: copy ~/.ray/auth_token from the head's "
        "machine (or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH), or start the cluster with RAY_AUTH_MODE=disabled"
    )


def _refuses(address: str, token: str | None) -> bool:
    """True if Ray's head at ``address`` refuses the token, or its absence. Ray reports any other problem better."""
    import grpc  # here, since only this needs it

    metadata = [("authorization", f"Bearer {token}")] if token else None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_PING)(b"", timeout=_PROBE_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def _token() -> tuple[str, str]:
    """The token of this machine, empty if it has none, and where Ray looks for it first."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip(), str(path)
    except OSError:
        return "", str(path)
