"""The address of a node, and the interface that goes with it."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from miles_async.arguments.cluster import ClusterArguments
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.addresses import LOCAL, LOOPBACK, Network

# covers: A6


@pytest.fixture
def known_by_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The address that Ray gives for this node."""
    address = [LOOPBACK]
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: address[0])
    return address


def test_one_machine_is_private() -> None:
    assert (LOCAL.address(), LOCAL.entrance()) == (LOOPBACK, LOOPBACK)
    assert LOCAL.variables({}) == {"GLOO_SOCKET_IFNAME": "lo"}  # not what the host name resolves to


def test_in_a_cluster_the_address_is_rays(known_by_ray: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host name resolves to, and whether or not there is a route outwards."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [_address(LOOPBACK)], "eth7": [_address("10.1.2.3")]})
    known_by_ray[0] = "10.1.2.3"
    network = Network.of_run(ClusterArguments(ray_address="10.1.2.1:6379"))
    assert (network.address(), network.entrance()) == ("10.1.2.3", "10.1.2.3")
    assert network.variables({}) == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    assert network.variables({"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "eth7"}  # the user's own


def test_an_address_that_the_node_does_not_have_is_a_clear_error(known_by_ray: list[str]) -> None:
    known_by_ray[0] = "203.0.113.9"
    with pytest.raises(ConfigurationError, match=r"knows this node as 203\.0\.113\.9, .*lo.* --node-ip-address"):
        Network(single_node=False).address()


def test_an_address_other_than_ipv4_is_a_clear_error(known_by_ray: list[str]) -> None:
    known_by_ray[0] = "2001:db8::9"
    with pytest.raises(ConfigurationError, match=r"node as 2001:db8::9: expected an IPv4 address.* --node-ip-address"):
        Network(single_node=False).address()


def test_flags_name_entrance_interface_and_ports(known_by_ray: list[str]) -> None:
    cluster = ClusterArguments(
        ray_address="10.1.2.1:6379", host="192.0.2.1", network_interface="lo", port_range="20000-20001"
    )
    network = Network.of_run(cluster)
    assert (network.address(), network.entrance()) == (LOOPBACK, "192.0.2.1")
    assert network.variables({"GLOO_SOCKET_IFNAME": "eth0"}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert list(network.ports) == [20000, 20001]
    with pytest.raises(ConfigurationError, match=r"--network-interface nosuch0: expected .* found .*lo"):
        Network(interface="nosuch0").variables({})


def _address(number: str) -> SimpleNamespace:
    return SimpleNamespace(address=number)
