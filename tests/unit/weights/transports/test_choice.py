"""Transports as flags choose them, and the flags that cannot work with one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_async.arguments import WeightsArguments
from miles_async.weights.transports.choice import TRANSPORTS, count_senders, transport_problems


def problems(
    device: str = "cpu", *, external_engines: bool = False, several_nodes: bool = False, **flags: str
) -> list[str]:
    kinds = {"external_engines": external_engines, "several_nodes": several_nodes}
    return list(transport_problems(WeightsArguments(**flags), device, **kinds))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_works_on_gpus(name: str) -> None:
    assert problems("cuda", weight_transport=name) == []


def test_a_transport_by_gpu_memory_needs_gpus() -> None:
    # covers: C3
    (problem,) = problems("cpu", weight_transport="ipc")
    assert problem == (
        "--weight-transport ipc works on cuda only, and this run's device is cpu: use distributed, disk or object_store"
    )


@pytest.mark.parametrize(
    ("name", "fine"), [("distributed", False), ("ipc", False), ("disk", True), ("object_store", True)]
)
def test_changes_are_sent_by_files_only(name: str, fine: bool) -> None:
    # covers: C3
    found = problems("cuda", weight_transport=name, weight_delta="xor")
    expected = f"--weight-delta xor needs files at the engines: --weight-transport disk or object_store, not {name}"
    assert found == ([] if fine else [expected])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_external_engines_are_reached_by_network_only(name: str) -> None:
    # covers: C3
    found = problems("cuda", weight_transport=name, external_engines=True)
    assert ["nothing of ours runs on their hosts" in problem for problem in found] == [True] * (name != "distributed")
    assert all(problem.endswith("use distributed") for problem in found)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_engines_of_several_nodes_are_reached_by_what_reaches_all_their_ranks(name: str) -> None:
    # covers: C3
    found = problems("cuda", weight_transport=name, several_nodes=True)
    assert bool(found) == (name == "ipc")
    assert all(problem.endswith("use distributed, disk or object_store") for problem in found)
    assert problems(weight_transport="disk", weight_delta="xor", several_nodes=True) != []


def test_an_unknown_transport_is_told_apart_from_one_of_the_users() -> None:
    # covers: C3
    (problem,) = problems(weight_transport="rsync")
    assert problem.startswith("--weight-transport rsync: expected distributed, disk, object_store, ipc, or module:attr")
    (problem,) = problems(weight_transport="Disk")
    assert problem.endswith("; did you mean disk?")
    (problem,) = problems(weight_transport="no_such_module:SPEC")
    assert "there is no module 'no_such_module'" in problem


def test_every_stage_sends_where_that_is_of_use() -> None:
    senders = {name: count_senders(WeightsArguments(weight_transport=name), 4) for name in TRANSPORTS}
    assert senders == {"distributed": 4, "disk": 1, "object_store": 4, "ipc": 1}


def test_the_driver_knows_all_transports_without_torch() -> None:
    code = "import sys; import miles_async.weights.transports.choice; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert found.stdout == "False\n"
