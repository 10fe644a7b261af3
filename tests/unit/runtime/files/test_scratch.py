"""Large temporary files go into memory as long as there is room for all who have chosen it, whether they have written
yet or not. File systems across a network, which get none, are told from local ones by the kernel's table of mounts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_async.runtime.files.owned_directory import OwnedDirectory
from miles_async.runtime.files.scratch import network_file_system, same_directory, scratch_directory

GIB = 2**30

CLAIMANT = """
import sys, time
from pathlib import Path
from miles_async.runtime.files.scratch import scratch_directory

print(scratch_directory(int(sys.argv[2]), memory=Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Memory with 23 GiB, less what is in it, and a disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()

    def usage(_: Path) -> SimpleNamespace:
        used = sum(512 * path.stat().st_blocks for path in memory.rglob("v*/*") if path.is_file())
        return SimpleNamespace(free=23 * GIB - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr("miles_async.runtime.files.scratch.free_memory", lambda: 64 * GIB)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    return memory, disk


def in_memory(directories: list[OwnedDirectory], memory: Path) -> int:
    return sum(directory.path.parent == memory for directory in directories)


def test_engines_that_choose_before_they_write_don_t_all_choose_memory(places: tuple[Path, Path]) -> None:
    memory, disk = places
    chosen = [scratch_directory(3 * GIB, memory=memory) for _ in range(8)]
    assert in_memory(chosen, memory) == 6, "6 · 3 GiB are claimed, and as much as one more is free"
    assert all(directory.path.parent == disk for directory in chosen[6:])
    chosen[0].remove()
    chosen.append(scratch_directory(3 * GIB, memory=memory))
    assert chosen[-1].path.parent == memory, "a claim goes with its directory"
    assert scratch_directory(12 * GIB, memory=memory).path.parent == disk


def test_the_used_part_of_a_claim_counts_once(places: tuple[Path, Path]) -> None:
    memory, _ = places
    first = scratch_directory(2**20, memory=memory)
    (first.path / "v1").mkdir()
    (first.path / "v1" / "bucket").write_bytes(bytes(2**20))
    os.link(first.path / "v1" / "bucket", first.path / "v1" / "again")
    room = (23 * GIB - 3 * 2**20) // 2  # the links' bytes are counted twice by this test's usage()
    assert scratch_directory(room, memory=memory).path.parent == memory


def test_claims_of_other_processes_count_until_they_die(places: tuple[Path, Path]) -> None:
    memory, disk = places
    command = [sys.executable, "-c", CLAIMANT, str(memory), str(1)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    claimed = Path(other.stdout.readline().strip())
    assert claimed.parent == memory
    (claimed / ".claim").write_text(str(20 * GIB))  # as one with as much memory would have
    assert scratch_directory(2 * GIB, memory=memory).path.parent == disk
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    assert scratch_directory(2 * GIB, memory=memory).path.parent == memory


def test_files_go_to_disk_where_memory_is_taken_or_the_room_unknown(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = places
    assert scratch_directory(None, memory=memory).path.parent == disk
    monkeypatch.setattr("miles_async.runtime.files.scratch.free_memory", lambda: 5 * GIB)
    assert scratch_directory(3 * GIB, memory=memory).path.parent == disk
    assert scratch_directory(2 * GIB, memory=memory).path.parent == memory


def test_without_memory_files_go_to_disk(places: tuple[Path, Path], tmp_path: Path) -> None:
    assert scratch_directory(1, memory=tmp_path / "absent").path.parent == places[1]


def test_a_network_disk_gets_no_large_files(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = places
    monkeypatch.setattr("miles_async.runtime.files.scratch.network_file_system", {disk: "nfs4"}.get)
    scratch_directory(GIB, memory=memory).remove()  # memory is local
    with pytest.raises(OSError, match=rf"TMPDIR {disk} on a network disk \(nfs4\): set TMPDIR"):
        scratch_directory(100 * GIB, memory=memory)
    assert list(disk.iterdir()) == []


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:21 / /scratch rw,relatime shared:1 - lustre mgs@tcp:/fs rw
24 23 0:22 / /scratch/local\040disk rw - xfs /dev/nvme0n1 rw
25 22 0:23 / /home rw,noatime master:1 - nfs4 server:/home rw,vers=4.2
26 22 0:24 / /home rw - tmpfs tmpfs rw
27 22 0:25 / /data rw - fuse.juicefs JuiceFS:data rw
28 22 0:26 / /box rw - fuse.fuse-overlayfs overlay rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/tmp/x", None),
        ("/scratch/me/tmp", "lustre"),
        ("/scratch/local disk/tmp", None),
        ("/scratcher", None),  # no part of /scratch
        ("/home/me", None),  # the later mount hides the earlier one
        ("/data/tmp", "fuse.juicefs"),
        ("/box", None),  # a container's own layers
    ],
)
def test_the_mount_that_a_place_is_on_says_its_kind(place: str, kind: str | None, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_file_system(Path(place), mounts) == kind


def test_without_a_table_nothing_is_said(tmp_path: Path) -> None:
    assert network_file_system(tmp_path, tmp_path / "absent") is None


def test_a_node_has_its_directory_where_another_one_has_it(places: tuple[Path, Path]) -> None:
    memory, disk = places
    for parent in (memory, disk):
        place = parent / "miles-async-theirs"
        made = same_directory(place, GIB, memory=memory)
        assert made.path == place
        assert same_directory(place, GIB, memory=memory) is None, "one machine"
        made.remove()
    with pytest.raises(OSError, match=f"room for 12.9 GB in {memory}, .* found it in {disk} only"):
        same_directory(memory / "miles-async-theirs", 12 * GIB, memory=memory)
    assert list(disk.iterdir()) == []
