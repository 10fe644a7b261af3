"""Which processes of a run are forked from one that has imported what they need."""

from __future__ import annotations

from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.live import with_flags
from miles_async.wiring.fork_servers import RunForkServers, fork_servers

CPU = with_flags(Arguments(), {"device": "cpu"})


def servers(tmp_path: Path, arguments: Arguments = CPU, device: Device = "cpu", threads: str = "1") -> RunForkServers:
    return fork_servers(arguments, tmp_path, device, tmp_path, {"OMP_NUM_THREADS": threads})


def test_on_cpu_everything_is_forked(tmp_path: Path) -> None:
    found = servers(tmp_path)
    assert found.engines is not None
    assert found.ranks is not None
    assert found.actors is not None
    assert str(found.ranks.path) in found.ranks.interpreter("a title")
    forked = found.for_engines()
    assert forked.servers == found.engines.path
    assert forked.interpreter == found.actors.interpreter("ray::EngineActor")
    assert len({server.path for server in found}) == 3


def test_on_cuda_nothing_is_forked(tmp_path: Path) -> None:
    found = servers(tmp_path, device="cuda")
    assert list(found) == []
    assert found.for_engines().servers is None
    assert found.interpreter("a title") is None


def test_what_is_not_forked(tmp_path: Path) -> None:
    assert list(servers(tmp_path, threads="2")) == [], "where imports start threads"
    assert servers(tmp_path, with_flags(CPU, {"train_backend": "another"})).ranks is None
    assert servers(tmp_path, with_flags(CPU, {"rollout_external": ("host:1",)})).engines is None


def test_in_a_cluster_only_engines_are_forked(tmp_path: Path) -> None:
    found = servers(tmp_path, with_flags(CPU, {"ray_address": "auto"}))
    assert list(found) == [found.engines]
