"""Addresses of a run's processes: one per node, which is Ray's own.

Everything uses it: HTTP servers, the rendezvous of process groups, and the interface that gloo and NCCL bind. Servers
listen at this address only, so announced (A6) and open addresses are the same. A run on one machine uses
127.0.0.1, which no other machine can reach.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from miles_async.arguments.cluster import ClusterArguments
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.tls import Tls

LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The network of a run, as its flags describe it; addresses and interfaces are those of the node that asks."""

    single_node: bool = True  # then every address is 127.0.0.1
    host: str | None = None  # --host
    interface: str | None = None  # --network-interface
    ports: range | None = None  # --port-range
    tls: Tls | None = None  # --tls-certificate and the like

    @classmethod
    def of_run(cls, cluster: ClusterArguments) -> Network:
        return cls(
            single_node=cluster.ray_address is None,
            host=cluster.host,
            interface=cluster.network_interface,
            ports=cluster.ports,
            tls=Tls.of_run(cluster),
        )

    def url(self, host: str, port: int) -> str:
        return f"{'http' if self.tls is None else 'https'}://{host}:{port}"

    def address(self) -> str:
        """Return the address at which servers on this node listen and are reached; in a cluster, in a process of Ray's.

        Raises ConfigurationError if this node does not have the address that Ray knows it by.
        """
        if self.single_node:
            return LOOPBACK
        import ray  # here, since tools and tests use engines without Ray

        address: str = ray.util.get_node_ip_address()
        _find_interface(address)
        return address

    def entrance(self) -> str:
        """Return the address of the router and the session server, which clients outside of the run may use, too."""
        return self.host or self.address()

    def variables(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables to add to ``environment``, so that gloo and NCCL bind the interface of this node's address.

        By default they take the address of the host name (127.0.1.1 on Debian), and any interface. ``environment``
        wins, unless --network-interface was given.
        """
        if self.interface is not None:
            _check_interface(self.interface)
            return dict.fromkeys((_GLOO, _NCCL), self.interface)
        # On one machine NCCL's data goes through memory and NVLink.
        names = (_GLOO,) if self.single_node else (_GLOO, _NCCL)
        return {name: _find_interface(self.address()) for name in names if name not in environment}


LOCAL = Network()
"""The network of a run on one machine."""


def _find_interface(address: str) -> str:
    """Return the name of this node's interface that has ``address``."""
    try:
        number = socket.gethostbyname(address)  # `ray start --node-ip-address` takes names, too
    except OSError as error:
        raise ConfigurationError(
            f"Ray knows this node as {address}: expected an IPv4 address, or a name of one ({error}): start Ray on it "
            "with --node-ip-address=<its IPv4 address>"
        ) from None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(number == each.address for each in addresses):
            return interface
    raise ConfigurationError(
        f"Ray knows this node as {address}, and none of its interfaces ({', '.join(psutil.net_if_addrs())}) has that "
        "address: start Ray on it with --node-ip-address=<address of the interface that other nodes reach>"
    )


def _check_interface(name: str) -> None:
    if name not in (found := psutil.net_if_addrs()):
        raise ConfigurationError(
            f"--network-interface {name}: expected an interface of every node, found {', '.join(found)} on "
            f"{socket.gethostname()}"
        )
