"""Functions that keep staged files on an engine's host.

They run in the engine's actor (``EngineFleet.on_host``) with its directory as the first argument, and hold nothing
between calls: the name of a version's directory shows that it is complete. Bytes come as a path that the host
shares with the sending rank, or as an array from an object store. Engines whose directories lie side by side share the
files by hard links, which remain when one of the engines is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from miles_async.errors import EngineError
from miles_async.runtime.tensor_digest import digest
from miles_async.types import TensorMeta
from miles_async.weights.delta import Bytes, ChangedTensor, apply
from miles_async.weights.files import bucket_file, version_directory

Source = str | Bytes
"""A path, or the bytes themselves; on their way a reference to the bytes, which is resolved on the host."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CHANGED = "changed"  # folder in a version's directory: the buckets that differ from the version before


def held_version(directory: Path) -> int | None:
    """The version whose files are complete; None if there is none."""
    versions = [int(path.name[1:]) for path in directory.glob("v*") if path.suffix != ".partial"]
    return max(versions, default=None)


def store_bucket(directory: Path, version: int, index: int, source: Source) -> None:
    """Store a bucket's file as it was staged."""
    path = _partial(directory, version) / bucket_file(index)
    if isinstance(source, str):
        shutil.copyfile(source, path)
    else:
        source.tofile(path)


def change_bucket(
    directory: Path, version: int, index: int, source: Source | None, base: int, tensors: Sequence[TensorMeta]
) -> None:
    """Make a bucket's file from version ``base`` and what changed since; ``source`` is None if nothing did.

    Raises EngineError if a changed tensor then differs from the staged one.
    """
    old = directory / version_directory(base) / bucket_file(index)
    new = _partial(directory, version) / bucket_file(index)
    if source is None:
        os.link(old, new)
        return
    data = Path(source).read_bytes() if isinstance(source, str) else source.data
    shutil.copyfile(old, new)
    contents = _tensors(new)
    expected = {tensor.name: tensor for tensor in tensors}
    for changed in msgspec.msgpack.decode(data, type=list[ChangedTensor]):
        content = contents[changed.name]
        apply(changed, content)
        meta = expected[changed.name]
        if (found := digest(content, changed.itemsize, meta.shape)) != meta.digest:
            raise EngineError(
                f"{changed.name} of version {version}, made from version {base} and what changed: expected digest "
                f"{meta.digest}, found {found}"
            )
    ahead = _partial(directory, version) / CHANGED
    ahead.mkdir(exist_ok=True)
    os.link(new, ahead / bucket_file(index))


class Place(msgspec.Struct, frozen=True):
    """Location of an engine's directory. Directories with the same ``parent`` see each other's files."""

    parent: tuple[str, int, int]  # id of the running machine, device and inode
    name: str


def find_place(directory: Path) -> Place:
    """Tell where the directory is."""
    status = directory.parent.stat()
    return Place((_BOOT_ID.read_text(), status.st_dev, status.st_ino), directory.name)


def find_copy(directory: Path, version: int) -> Place | None:
    """Return the directory's location if all files of ``version`` are in it."""
    return find_place(directory) if (directory / version_directory(version)).is_dir() else None


def link_version(directory: Path, version: int, neighbour: str, files: Sequence[str]) -> str | None:
    """Share ``files`` of a version with the sibling directory ``neighbour``. Returns the directory that the
    engine has to load; None if the neighbour is gone.
    """
    source, partial = directory.parent / neighbour / version_directory(version), _partial(directory, version)
    try:
        for file in files:
            (partial / file).parent.mkdir(exist_ok=True)
            os.link(source / file, partial / file)
    except FileNotFoundError:
        shutil.rmtree(partial)
        return None
    return complete(directory, version)


def complete(directory: Path, version: int) -> str:
    """Mark the version whole and remove older ones. Returns the directory that the engine has to load."""
    target = directory / version_directory(version)
    shutil.rmtree(target, ignore_errors=True)
    _partial(directory, version).rename(target)
    for other in directory.glob("v*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    changed = target / CHANGED
    return str(changed if changed.exists() else target)


def discard(directory: Path) -> None:
    """Remove all versions."""
    for version in directory.glob("v*"):
        shutil.rmtree(version, ignore_errors=True)


def _partial(directory: Path, version: int) -> Path:
    partial = directory / f"{version_directory(version)}.partial"
    partial.mkdir(exist_ok=True)
    return partial


def _tensors(path: Path) -> dict[str, Bytes]:
    """The bytes of each tensor of a safetensors file, mapped for writing."""
    content = np.memmap(path, np.uint8, mode="r+")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")  # a length, a JSON header of that length, the data
    header = msgspec.json.decode(content[8:start].tobytes())
    return {
        name: content[start + first : start + end]
        for name, (first, end) in ((name, entry["data_offsets"]) for name, entry in header.items())
    }
