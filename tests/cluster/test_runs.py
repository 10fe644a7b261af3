"""The quick start, shortened, on a cluster: machines with an address, memory and files of their own."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, Machines, machines, needs_machines, on_second_network
from tests.cluster.runs import GENERATE, RUN_DIR, RUN_SECONDS, TRAIN, assert_ends, cluster_run
from tests.integration.real_run import RealRun, traceback_in

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), needs_machines]

SHORT = ("--num-rollout", "4", "--eval-prompt-data", "none", "--eval-interval", "none")
SMALL = (*SHORT, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
PORTS = range(21000, 21030)
LISTEN = "0A"  # a state of TCP, as /proc writes it


def logs_on(cluster: Machines, position: int) -> set[str]:
    return {path.name for path in cluster[position].seen_from_host(f"{RUN_DIR}/logs").glob("*.log")}


def assert_trained(run: RealRun, steps: int) -> None:
    summary = run.summary
    assert summary["steps"] == steps
    groups = summary["groups"]
    assert groups["trained"] == steps * 16
    assert groups["issued"] == sum(count for name, count in groups.items() if name != "issued")
    assert summary["logprob_diff"]["max"] < 1e-4  # the same weights on both sides


def listening(machine: Machine) -> set[tuple[str, int]]:
    """(address, port) on which a process of this machine accepts connections, by IPv4 or IPv6."""
    tables = [path.read_text() for path in Path(f"/proc/{machine.pid}/net").glob("tcp*")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTEN]
    return {(_address(written), int(port, 16)) for written, port in ends}


def _address(written: str) -> str:
    """Read an address as /proc writes it: in words of 32 bits, the last byte of each first."""
    words = [bytes.fromhex(written[first : first + 8])[::-1] for first in range(0, len(written), 8)]
    return str(ip_address(b"".join(words)))


def assert_refused(cluster: Machines, *flags: str, problem: str) -> None:
    """A run with ``flags`` ends with one line that says why, and leaves nothing."""
    with cluster_run(cluster, *SMALL, *flags) as run:
        assert run.wait(RUN_SECONDS) != 0, run.output
        run.assert_nothing_left()
        [error] = [line for line in run.output.splitlines() if line.startswith("error:")]
        assert problem in error, run.output
        assert not traceback_in(run.output)


@pytest.mark.long
def test_ranks_on_one_machine_and_engines_on_another(tmp_path: Path) -> None:
    # covers: A6
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: "pool=train", 1: "pool=generate"})
        with cluster_run(cluster, *SMALL, *TRAIN, *GENERATE, "--num-rollout", "2") as run:
            assert_ends(run)
        assert_trained(run, 2)
        assert {"trainer-0.log", "router.0.log"} <= logs_on(cluster, 0)
        assert logs_on(cluster, 1) == {"engine-0.0.log"}


@pytest.mark.long
def test_ranks_and_engines_on_both_machines(tmp_path: Path) -> None:
    """Data parallel over machines, each of which generates, too. RAY_ADDRESS says which cluster to join."""
    # covers: A6
    flags = (*SHORT, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1")
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray()
        with cluster_run(cluster, *flags, address_in="environment") as run:
            assert_ends(run)
        assert_trained(run, 4)
        here, there = logs_on(cluster, 0), logs_on(cluster, 1)
        assert len(here & {"trainer-0.log", "trainer-1.log"}) == 1
        assert there == {"engine-1.0.log", *({"trainer-0.log", "trainer-1.log"} - here)}


@pytest.mark.long
def test_nothing_is_shared_but_the_checkpoints_and_the_export(tmp_path: Path) -> None:
    """The run on one machine, ranks on another and engines on a third; every server at its machine's address only; the
    router and the ranks of an engine on loopback.
    """
    # covers: A6, A7
    shared = tmp_path / "shared"
    shared.mkdir()
    outputs = ("--save", str(shared / "checkpoints"), "--save-hf", str(shared / "hf"))
    ports = ("--port-range", f"{PORTS.start}-{PORTS.stop - 1}")
    with machines(tmp_path, 3, [shared]) as cluster:
        cluster.start_ray({1: "pool=train", 2: "pool=generate"})
        with cluster_run(cluster, *SMALL, *TRAIN, *GENERATE, *outputs, *ports) as run:
            run.wait_for_steps(1, RUN_SECONDS)
            # Router; rendezvous; engine and its ranks.
            expected = [{"127.0.0.1"}, {cluster[1].address}, {cluster[2].address, "127.0.0.1"}]
            for machine, addresses in zip(cluster.all, expected, strict=True):
                assert {found for found, port in listening(machine) if port in PORTS} == addresses
            assert_ends(run)
        assert_trained(run, 4)
        assert logs_on(cluster, 1) == {"trainer-0.log"}
        assert logs_on(cluster, 2) == {"engine-0.0.log"}
        assert list((shared / "hf").glob("*.safetensors"))
        assert not list(shared.glob("miles-async-*"))
        for machine in cluster.all[1:]:  # of staging and servers
            assert not list(machine.tmp.rglob("miles-async-*"))


@pytest.mark.long
def test_gloo_binds_the_interface_that_is_named_and_the_router_the_address(tmp_path: Path) -> None:
    """Each machine has a second network, of which Ray knows nothing."""
    # covers: A6
    with machines(tmp_path, 2) as cluster:
        cluster.add_second_network()
        cluster.start_ray({0: "pool=train", 1: "pool=generate"})
        router = (on_second_network(cluster[0]), PORTS.start)
        named = ("--host", router[0], "--sglang-router-port", str(router[1]), "--network-interface", "eth1")
        with cluster_run(cluster, *SMALL, *TRAIN, *GENERATE, *named) as run:
            run.wait_for_steps(1, RUN_SECONDS)
            assert {end for end in listening(cluster[0]) if end[1] == router[1]} == {router}
            for machine in cluster.all:  # gloo
                assert on_second_network(machine) in {address for address, _ in listening(machine) - {router}}
            assert_ends(run)
        assert_trained(run, 4)


@pytest.mark.long
def test_paths_that_have_to_be_shared_and_are_not_are_refused(tmp_path: Path) -> None:
    # covers: C12
    with machines(tmp_path, 2) as cluster:
        cluster.start_ray({0: "pool=generate", 1: "pool=train"})
        assert_refused(cluster, *TRAIN, *GENERATE, "--save", "/tmp/checkpoints", problem="--save: expected a directory")
        disk = ("--weight-transport", "disk", "--weight-staging-dir", "/tmp/staged")
        assert_refused(cluster, *TRAIN, *GENERATE, *disk, problem="--weight-staging-dir: expected a directory")
    with machines(tmp_path / "engines", 2) as cluster:  # only engines lack it, and only one of them
        cluster.start_ray({0: "pool=train"})
        two = ("--rollout-num-gpus", "2")
        assert_refused(cluster, *TRAIN, *two, *disk, problem="--weight-staging-dir: expected a directory")


@pytest.mark.long
def test_a_cluster_that_cannot_be_joined_or_has_no_such_nodes_is_refused(tmp_path: Path) -> None:
    # covers: C10
    with machines(tmp_path, 1) as cluster:
        cluster.start_ray()
        nodes = ("--rollout-node-labels", "pool=generate", "--engine-max-restarts", "0")
        assert_refused(cluster, *nodes, problem="for engines, found 10.77.0.1 (1 CPU) (--rollout-node-labels)")
        cluster[0].seen_from_host("/tmp/home/.ray/auth_token").unlink()
        assert_refused(cluster, problem="the cluster wants a token, and there is none in /tmp/home/.ray/auth_token")
