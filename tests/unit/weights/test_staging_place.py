"""Where weights are staged: in memory where they fit, private, and nowhere without room."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import ConfigurationError
from miles_async.runtime.files.owned_directory import OwnedDirectory
from miles_async.weights.staging import make_staging_directory
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.choice import TRANSPORTS, make_sender

GB = 10**9


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk with 20 GB for temporary files, and memory with 40 GB."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    made: Any = make_staging_directory.__globals__["scratch_directory"]

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=(40 if path.is_relative_to(memory) else 20) * GB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    for module in ("runtime.files.scratch", "weights.staging"):
        monkeypatch.setattr(f"miles_async.{module}.free_memory", lambda: 64 * GB)
    monkeypatch.setattr(
        "miles_async.weights.staging.scratch_directory",
        lambda room, *, mode: made(room, mode=mode, memory=memory),
    )
    return disk


def place(**options: object) -> OwnedDirectory:
    return make_staging_directory(StagingOptions(bucket_bytes=1, **options))


def test_weights_are_staged_in_memory_where_three_versions_and_their_copy_fit_twice(disk: Path) -> None:
    # covers: C8
    with capture_logs() as logs:
        in_memory = place(version_bytes=5 * GB)
    assert in_memory.path.parent == disk.parent / "memory"
    assert in_memory.path.stat().st_mode & 0o777 == 0o700
    [said] = logs
    assert (said["directory"], said["room_gb"]) == (str(in_memory.path), 15.0)
    assert place(version_bytes=5 * GB).path.parent == disk, "the first one's claim counts, though it wrote nothing"
    assert place(version_bytes=None).path.parent == disk
    assert place(version_bytes=3 * GB, delta="xor").path.parent == disk, "as much again for deltas"


def test_a_place_without_room_is_refused(disk: Path, tmp_path: Path) -> None:
    # covers: C10
    with pytest.raises(ConfigurationError, match=r"expected 30.0 GB for 3 versions, found 20.0 GB.*staging-dir"):
        place(version_bytes=10 * GB)
    assert not list(disk.iterdir())
    named = tmp_path / "named"
    with pytest.raises(ConfigurationError, match=r"staged in .*named: expected 24.0 GB"):
        place(parent=named, version_bytes=8 * GB)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--weight-staging-dir"):
        place(parent=tmp_path / "file")


def test_a_copy_needs_memory(disk: Path, tmp_path: Path) -> None:
    # covers: C10
    with pytest.raises(ConfigurationError, match=r"expected 65.0 GB for this rank's share, found 64.0 GB.*pipeline"):
        place(parent=tmp_path / "named", version_bytes=65 * GB)
    assert not (tmp_path / "named").exists()


def test_each_sender_needs_room_for_its_share(disk: Path) -> None:
    # covers: C8
    with capture_logs() as logs:
        sender = make_sender(WeightsArguments(), "cpu", "127.0.0.1", version_bytes=20 * GB, sender=1, senders=4)
    assert [said["room_gb"] for said in logs] == [15.0]
    sender.close()
    with pytest.raises(ConfigurationError, match=r"expected 60\.0 GB"):
        make_sender(WeightsArguments(), "cpu", "127.0.0.1", version_bytes=20 * GB)


@pytest.mark.parametrize(("transport", "mode"), [("disk", 0o755), ("object_store", 0o700), ("distributed", 0o700)])
def test_others_may_read_only_what_engines_load_from_a_shared_place(transport: str, mode: int, tmp_path: Path) -> None:
    # covers: C13
    assert transport in TRANSPORTS
    arguments = WeightsArguments(weight_transport=transport, weight_staging_dir=tmp_path)
    sender = make_sender(arguments, "cpu", "127.0.0.1", version_bytes=100)
    [directory] = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == mode
    sender.close()
    assert not list(tmp_path.iterdir())
