"""Exported weights as files: one format, written once per version, that every transport can send from.

Training waits while a sending rank copies its share to host memory, and continues while another thread takes digests,
finds what changed and writes the files, which are mapped to be read. Nothing is synced to the device: this is no
checkpoint, and a machine that crashes loses its engines too.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_async.arguments.weights import DeltaEncoding
from miles_async.errors import ConfigurationError, TrainerError
from miles_async.runtime.files.owned_directory import OwnedDirectory
from miles_async.runtime.files.scratch import scratch_directory
from miles_async.runtime.memory import free_memory
from miles_async.runtime.tensor_digest import digest
from miles_async.types import StagedWeights, TensorMeta, WeightDelta
from miles_async.weights import fp8
from miles_async.weights.delta import Bytes, encode
from miles_async.weights.files import MANIFEST, bucket_file, delta_file, version_directory
from miles_async.weights.slab import Slab
from miles_async.weights.staging_options import StagingOptions

log = structlog.get_logger(__name__)

Bucket = dict[str, Tensor]
"""Tensors of bounded size, which become one file and one update request: small buckets save an engine memory, large
ones save requests.
"""

_LIST = b"\xdd"  # MessagePack's prefix of a list, whose length follows in 4 bytes


@dataclass(frozen=True, slots=True)
class _Copy:
    """One version in host memory."""

    version: int
    buckets: Sequence[Bucket]
    wait: Callable[[], None]  # until it is complete


class Staging:
    """Implements WeightSender: stages weights. Transports that send more than files extend it."""

    def __init__(self, options: StagingOptions) -> None:
        """Raises ConfigurationError if there is no room for the files."""
        self._options = options
        self._directory = make_staging_directory(options)
        self._slab = Slab(options.bucket_bytes)
        self._copy: _Copy | None = None  # to be staged
        self._kept: _Copy | None = None  # staged, and in memory until the next version is copied
        self._writing = threading.Lock()  # held while the copy is read
        self._staged: dict[int, StagedWeights] = {}  # in the order in which they were staged
        self._pinned: list[int] = []  # as often as it is pinned

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this sender's share of ``tensors``. Raises TrainerError while the version before is being staged."""
        if self._writing.locked():
            raise TrainerError(f"version {version} cannot be copied while the version before is being staged")
        self._copy = self._kept = None
        self._slab.clear()
        mine = share(tensors, self._options.sender, self._options.senders)
        if self._options.quantization == "fp8":
            mine = fp8.quantized(mine)
        copies = ((name, self._slab.copy(tensor)) for name, tensor in mine)
        buckets = tuple(into_buckets(copies, self._options.bucket_bytes))
        self._copy = _Copy(version, buckets, self._slab.copied())

    def stage(self, version: int) -> StagedWeights:
        """Write the copied weights to files. Raises TrainerError when that fails."""
        directory = self._directory.path / version_directory(version)
        with self._writing:
            copy, self._copy = self._copy, None
            if copy is None or copy.version != version:
                raise TrainerError(f"weights of version {version} cannot be staged: they were not copied")
            copy.wait()
            self._remove_old(version)
            try:
                staged = self._write(version, directory, copy.buckets)
            except (OSError, SafetensorError) as error:
                raise TrainerError(
                    f"the weights of version {version} cannot be staged in {directory}: {error} (--weight-staging-dir)"
                ) from error
        self._staged[version], self._kept = staged, copy
        return staged

    def _remove_old(self, version: int) -> None:
        """Make room for ``version``, which is copied once the previous one is delivered: engines need no older one."""
        self._staged.pop(version, None)
        for old in list(self._staged)[: 1 - self._options.keep]:
            if old not in self._pinned:
                shutil.rmtree(self._staged.pop(old).directory, ignore_errors=True)

    def pin(self, version: int) -> None:
        self._pinned.append(version)

    def unpin(self, version: int) -> None:
        self._pinned.remove(version)

    def file(self, version: int, name: str) -> Path:
        """Path of a file of a staged version. Raises TrainerError if that version is not there any more."""
        if version not in self._staged:
            raise TrainerError(f"weights of version {version} are not staged, only {list(self._staged)}")
        return Path(self._staged[version].directory) / name

    def bucket(self, version: int, index: int) -> Tensor:
        """Map a bucket's tensors, one after another, as uint8 [bytes]; nothing is read yet."""
        path = self.file(version, bucket_file(index))
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")  # safetensors: length, JSON header, data
        # "c": a private mapping; torch warns about memory that it may not write to.
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=8 + header_bytes))

    def on_device(self, version: int, index: int, device: torch.device) -> Tensor:
        """Return a complete bucket on ``device``, otherwise like :meth:`bucket`. A GPU reads the pinned copy, or the
        file once another version was copied.
        """
        if device.type == "cpu":
            return self.bucket(version, index)
        tensors = self._in_memory(version, index)
        data = None if tensors is None else _joined(tensors, device)
        if data is None or self._in_memory(version, index) is None:  # it may have been overwritten meanwhile
            data = self.bucket(version, index).to(device)
        return data

    def _in_memory(self, version: int, index: int) -> list[Tensor] | None:
        if (kept := self._kept) is None or kept.version != version:
            return None
        bucket = kept.buckets[(index - self._options.sender) // self._options.senders]
        return [bucket[meta.name] for meta in self.metas(version, index)]

    def metas(self, version: int, index: int) -> tuple[TensorMeta, ...]:
        """The tensors of a bucket, in the order of their bytes."""
        return self._staged[version].buckets[index]

    def close(self) -> None:
        """Remove all files; idempotent."""
        self._staged.clear()
        self._directory.remove()

    def _write(self, version: int, directory: Path, copies: Sequence[Bucket]) -> StagedWeights:
        partial = directory.with_name(directory.name + ".partial")
        for leftover in (partial, directory):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        base, encoding = self._staged.get(version - 1), self._options.delta
        delta = _DeltaWriter(base, encoding) if encoding and base else None
        buckets: dict[int, tuple[TensorMeta, ...]] = {}
        total_bytes = 0
        for position, bucket in enumerate(copies):
            index = self._options.sender + position * self._options.senders
            path = partial / bucket_file(index)
            save_file(bucket, path)
            path.chmod(0o644)  # safetensors makes it private, and engines may run under another user
            in_file = safe_open(path, "pt").offset_keys()  # by their bytes: wide dtypes come first, to align all
            buckets[index] = tuple(self._describe(name, bucket[name]) for name in in_file)
            total_bytes += sum(tensor.nbytes for tensor in bucket.values())
            if delta is not None:
                delta.write(index, partial / delta_file(index), bucket)
        staged = StagedWeights(
            version=version,
            directory=str(directory),
            buckets=buckets,
            total_bytes=total_bytes,
            senders=self._options.senders,
            delta=delta.result if delta else None,
        )
        (partial / MANIFEST).write_bytes(msgspec.json.encode(staged))
        partial.rename(directory)
        return staged

    def _describe(self, name: str, tensor: Tensor) -> TensorMeta:
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = digest(_raw(tensor), tensor.itemsize, tensor.shape) if self._options.digests else ""
        return TensorMeta(name, dtype, tuple(tensor.shape), found)


def share(tensors: Iterable[tuple[str, Tensor]], sender: int, senders: int) -> Iterator[tuple[str, Tensor]]:
    """Every ``senders``-th module, starting with number ``sender``. Takes all tensors: exporting is collective."""
    for number, module in enumerate(_modules(tensors)):
        if number % senders == sender:
            yield from module


def into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most ``max_bytes`` in the order given; a larger module gets a whole bucket."""
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    pending: Bucket = {}
    size = 0
    for named in _modules(tensors):
        module = dict(named)
        module_size = sum(tensor.nbytes for tensor in module.values())
        if pending and size + module_size > max_bytes:
            yield pending
            pending, size = {}, 0
        pending |= module
        size += module_size
    if pending:
        yield pending


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """A module is never split: some of SGLang's loaders join tensors of one (q_a_proj and kv_a_proj_with_mqa of
    DeepSeek-V3's attention), and forget the first unless they get the second with it.
    """
    for _, module in groupby(tensors, key=lambda item: item[0].rsplit(".", 2)[0]):  # "module.linear.weight"
        yield module


class _DeltaWriter:
    """Writes what changed since ``base``, bucket by bucket."""

    def __init__(self, base: StagedWeights, encoding: DeltaEncoding) -> None:
        self._base = base
        self._encoding = encoding
        self._bucket_index = {meta.name: index for index, metas in base.buckets.items() for meta in metas}
        self._bytes: dict[int, int] = {}
        self._same_tensors = True
        self._open_index = -1
        self._file: safe_open | None = None

    @property
    def result(self) -> WeightDelta | None:
        """The changes as written; None if tensors were added, removed or reshaped, which no delta describes."""
        if not self._same_tensors or self._bytes.keys() != self._base.buckets.keys():
            return None
        return WeightDelta(base_version=self._base.version, bucket_bytes=self._bytes)

    def write(self, index: int, path: Path, bucket: Bucket) -> None:
        """Encode and write one tensor after another: together they may be as large as the bucket.

        Leaves no file if nothing changed.
        """
        count = 0
        with path.open("wb") as file:
            file.write(_LIST + bytes(4))
            for name, tensor in bucket.items():
                if (old := self._old(name)) is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                    self._same_tensors = False
                    break
                if changed := encode(name, _raw(old), _raw(tensor), tensor.itemsize, self._encoding):
                    file.write(msgspec.msgpack.encode(changed))
                    count += 1
            size = file.tell()
            file.seek(len(_LIST))
            file.write(count.to_bytes(4, "big"))
        if not count or not self._same_tensors:
            path.unlink()
        self._bytes[index] = size if count else 0

    def _old(self, name: str) -> Tensor | None:
        index = self._bucket_index.get(name)
        if index is None:
            return None
        if index != self._open_index:  # buckets are the same in every version: each file is opened once
            self._file = safe_open(Path(self._base.directory) / bucket_file(index), "pt")
            self._open_index = index
        assert self._file is not None
        return self._file.get_tensor(name)


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Bytes of pinned tensors, one after another, which the GPU reads directly."""
    data = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=device)
    for place, tensor in zip(data.split([tensor.nbytes for tensor in tensors]), tensors, strict=True):
        place.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return data


def _raw(tensor: Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def make_staging_directory(options: StagingOptions) -> OwnedDirectory:
    """Make a directory with room for what one sender stages: in memory where it fits, else on disk, or in the directory
    that the user names. Raises ConfigurationError if there is no room, or no memory for the copy that is staged.
    """
    _check_memory(options)
    mode = 0o755 if options.shared else 0o700
    try:
        if options.parent is None:
            directory = scratch_directory(options.room_in_memory, mode=mode)
        else:
            directory = OwnedDirectory(options.parent, mode=mode)
        free = shutil.disk_usage(directory.path).free
    except OSError as error:
        raise ConfigurationError(f"weights cannot be staged: {error} (--weight-staging-dir)") from error
    needed = options.room or 0
    if free < needed:
        directory.remove()
        raise ConfigurationError(
            f"weights cannot be staged in {directory.path.parent}: expected {needed / 1e9:.1f} GB for "
            f"{options.versions} versions, found {free / 1e9:.1f} GB: name a directory with more room by "
            "--weight-staging-dir"
        )
    log.info("weights are staged", directory=str(directory.path), room_gb=round(needed / 1e9, 1))
    return directory


def _check_memory(options: StagingOptions) -> None:
    needed, free = options.version_bytes or 0, free_memory()
    if free < needed:
        raise ConfigurationError(
            f"weights cannot be copied to host memory: expected {needed / 1e9:.1f} GB for this rank's share, found "
            f"{free / 1e9:.1f} GB free: with --weight-transport distributed or object_store every pipeline stage "
            "(--pipeline-model-parallel-size) has a sending rank with a share"
        )
