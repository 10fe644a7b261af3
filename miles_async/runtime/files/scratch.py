"""Scratch directories for large temporary files: in memory if there is room, else on a local disk.

Processes that choose before any of them has written would all see the same free memory. So each directory in memory
notes how much it claims, unused claims count as taken, and processes of one machine choose one after another.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from miles_async.runtime.files.owned_directory import PREFIX, OwnedDirectory, sweep
from miles_async.runtime.memory import free_memory

MEMORY = Path("/dev/shm")
_MOUNTS = Path("/proc/self/mountinfo")
_ACROSS_A_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs\w*|ceph|glusterfs|afs|wekafs|panfs|pvfs2|orangefs|ocfs2"
    r"|fuse\.(sshfs|juicefs|s3fs|gcsfuse|glusterfs|ceph\S*|rclone|mount-s3|goofys|geesefs|blobfuse2?|cvmfs\w*)"
)
_CLAIM = ".claim"  # bytes that the owner of a directory may come to use


def scratch_directory(
    room: int | None, *, mode: int = 0o755, memory: Path = MEMORY, name: str | None = None
) -> OwnedDirectory:
    """Make a directory for ``room`` bytes: in ``memory`` if as much again stays free after all claims, else on disk.

    ``room``: None if unknown: use a disk. ``mode``, ``name``: see ``OwnedDirectory``. Raises OSError, also where
    TMPDIR is a network disk: every publication would wait for it, and all nodes would write to it at once.
    """
    if room is not None:
        with suppress(OSError), _choosing(memory):
            sweep(memory)
            free = min(shutil.disk_usage(memory).free, free_memory())
            if free - _claimed(memory) >= 2 * room:
                directory = OwnedDirectory(memory, mode=mode, name=name)
                (directory.path / _CLAIM).write_text(str(room))
                return directory
    disk = Path(tempfile.gettempdir())
    if (kind := network_file_system(disk)) is not None:
        raise OSError(
            f"expected room in {memory} or a local disk, found TMPDIR {disk} on a network disk ({kind}): set TMPDIR to "
            f"a local one, or make {memory} larger"
        )
    return OwnedDirectory(disk, mode=mode, name=name)


def same_directory(place: Path, room: int, *, memory: Path = MEMORY) -> OwnedDirectory | None:
    """Make a directory for ``room`` bytes at ``place``, where another node has one. None if that node is this machine.

    Raises OSError if it would be elsewhere on this node.
    """
    if place.exists():
        return None
    directory = scratch_directory(room if place.parent == memory else None, memory=memory, name=place.name)
    if directory.path == place:
        return directory
    directory.remove()
    raise OSError(
        f"expected room for {room / 1e9:.1f} GB in {place.parent}, where the engine's first node has its files, found "
        f"it in {directory.path.parent} only: all nodes of an engine need the same TMPDIR, and as much room in {memory}"
    )


@contextmanager
def _choosing(memory: Path) -> Iterator[None]:
    """One process after another; the lock is the directory's own, so that no file stays."""
    lock = os.open(memory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _claimed(memory: Path) -> int:
    """Bytes that are claimed and not used yet."""
    unused = 0
    for claim in memory.glob(f"{PREFIX}*/{_CLAIM}"):
        with suppress(OSError, ValueError):  # gone meanwhile
            unused += max(0, int(claim.read_text()) - _used(claim.parent))
    return unused


def _used(directory: Path) -> int:
    found = {}
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            found[status.st_ino] = 512 * status.st_blocks  # a file may have several names
    return sum(found.values())


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the kind of the file system that ``path`` is on, as "nfs4", if it is across a network; else None."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # not Linux, or no access: assume a local one
        return None
    place = path.resolve()
    longest, kind = -1, ""
    for line in lines:  # man 5 proc: id, parent, device, root, mount point, options, ... - kind, source, options
        before, dash, after = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split(" ")[4]))
        if dash and place.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            longest, kind = len(point.parts), after.split(" ")[0]
    return kind if _ACROSS_A_NETWORK.fullmatch(kind) else None
