"""Limits of the system on connections are raised as far as they may be, and told where they are too low."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.runs.checks import connection_problems
from miles_async.runtime.network import open_files
from miles_async.runtime.network.open_files import connection_limits


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with 2,500 open files per process and 1,000 ports."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 2500))
    ports = tmp_path / "ip_local_port_range"
    ports.write_text("32768\t33767\n")
    monkeypatch.setattr(open_files, "_PORTS", ports)


@pytest.mark.usefixtures("machine")
def test_requests_need_two_files_of_the_router_and_a_port_each() -> None:
    assert connection_limits(1000) == []
    (ports,) = connection_limits(1001)[1:]
    assert "1001 ports" in ports
    assert "has 1000" in ports
    assert "2502 open files" in connection_limits(1001)[0]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("engines", "batch", "found"),
    [(100, 400, True), (100, 2, False), (2, 400, False)],  # as many as engines take, unless fewer are admitted
)
def test_a_run_with_more_requests_than_connections_is_refused_with_the_flag(
    engines: int, batch: int, found: bool
) -> None:
    arguments = Arguments(
        cluster=ClusterArguments(rollout_num_gpus=engines),
        rollout=RolloutArguments(
            rollout_batch_size=batch, n_samples_per_prompt=8, num_rollout=1, rollout_concurrency_per_engine=64
        ),
        staleness=StalenessArguments(max_weight_staleness=2),
    )
    problems = list(connection_problems(arguments))
    assert bool(problems) is found
    for problem in problems:
        assert "--rollout-concurrency-per-engine 64 on 100 engines: up to 6400 requests at once need" in problem


def test_a_process_and_its_children_may_open_as_many_files_as_the_system_allows() -> None:
    program = (
        "import resource, subprocess\n"
        "from miles_async.runtime.network.open_files import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 900))\n"
        "allow_open_files()\n"
        "print(subprocess.check_output(['sh', '-c', 'ulimit -Sn'], text=True))\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == ["900"]
