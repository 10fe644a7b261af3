"""Limits of the system that a run would trip over, each with the command that raises it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_async.arguments.cluster import Device
from miles_async.machine import limits
from miles_async.machine.limits import (
    connection_findings,
    disk_findings,
    home_findings,
    locked_memory_findings,
    process_findings,
    shared_memory_findings,
)
from miles_async.runtime.network import open_files


def space(monkeypatch: pytest.MonkeyPatch, free: int, *, total: int = 64 << 30, files: int = 1000) -> None:
    status = SimpleNamespace(f_frsize=4096, f_bavail=free // 4096, f_blocks=total // 4096, f_files=9999, f_favail=files)
    monkeypatch.setattr(limits.os, "statvfs", lambda path: status)


@pytest.mark.parametrize(("device", "verdict"), [("cpu", "warning"), ("cuda", "failure")])
def test_the_shared_memory_of_a_container_is_too_small(
    monkeypatch: pytest.MonkeyPatch, device: Device, verdict: str
) -> None:
    space(monkeypatch, 60 << 20, total=64 << 20)
    [finding] = shared_memory_findings(device)
    assert finding.verdict == verdict
    assert finding.found == "/dev/shm has 0.1 GiB free of 0.1 GiB, expected 2.0 GiB or more"
    assert "--shm-size=16g" in finding.mend


def test_enough_shared_memory_is_fine_and_none_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [missing] = shared_memory_findings("cuda", tmp_path / "absent")
    assert missing.verdict == "failure"
    assert "No such file" in missing.found
    space(monkeypatch, 2 << 30)
    assert [finding.verdict for finding in shared_memory_findings("cuda")] == ["ok"]


@pytest.mark.parametrize(("free", "verdict"), [(100 << 20, "failure"), (5 << 30, "warning"), (20 << 30, "ok")])
def test_a_disk_that_is_nearly_full_is_named_with_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, verdict: str
) -> None:
    space(monkeypatch, free)
    [finding] = disk_findings({"--run-dir": tmp_path / "not" / "there" / "yet"})
    assert finding.verdict == verdict
    assert finding.found.startswith(f"--run-dir: {tmp_path} has ")


def test_a_disk_without_inodes_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space(monkeypatch, 20 << 30, files=0)
    [finding] = disk_findings({"TMPDIR": tmp_path})
    assert finding.verdict == "failure"
    assert "no inode left" in finding.found
    assert "--inodes" in finding.mend


def test_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ports = tmp_path / "ip_local_port_range"
    ports.write_text("1024\t65535\n")
    monkeypatch.setattr(open_files, "_PORTS", ports)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    [finding] = connection_findings()
    assert finding.verdict == "warning"
    assert "a process here may have 4096" in finding.found
    assert "ulimit -Hn" in finding.mend
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 20))
    assert [finding.verdict for finding in connection_findings()] == ["ok"]


def test_few_processes_of_the_user_or_the_container_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pids.max").write_text("512\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    user, container = process_findings((tmp_path / "pids.max",))
    assert user.verdict == container.verdict == "warning"
    assert "may have 1024 processes" in user.found
    assert "may have 512 processes" in container.found
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # whom the limit of users does not bind
    (tmp_path / "pids.max").write_text("max\n")
    [fine] = process_findings((tmp_path / "pids.max",))
    assert (fine.verdict, fine.found) == ("ok", "no limit")


def test_locked_memory_matters_where_there_is_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 8 << 20))
    assert not list(locked_memory_findings(tmp_path / "absent"))
    (tmp_path / "mlx5_0").mkdir()
    [finding] = locked_memory_findings(tmp_path)
    assert finding.verdict == "warning"
    assert "memlock=-1" in finding.mend
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, resource.RLIM_INFINITY))
    assert [finding.verdict for finding in locked_memory_findings(tmp_path)] == ["ok"]


def test_a_home_that_cannot_be_written_to_has_no_place_for_rays_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [finding.verdict for finding in home_findings()] == ["ok"]
    monkeypatch.setattr(limits.os, "access", lambda path, mode: False)
    [closed] = home_findings()
    assert closed.verdict == "failure"
    assert closed.problem.startswith(f"home: HOME={tmp_path} cannot be written to, and Ray keeps its token there")
    assert "export HOME=" in closed.problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    assert [finding.verdict for finding in home_findings()] == ["warning"]
