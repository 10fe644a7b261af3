"""One rank's part of a megatron checkpoint in three steps: plan with all ranks, write it alone, write the index.

Only the first step is collective and reads tensors that training changes, so the second may run in a thread while the
rank trains. megatron-core 0.19 plans the same way, but spawns a process that manages a queue, even for a synchronous
save, and forks one for an asynchronous save. The spawn imports ``__main__`` again (seconds, and wrong inside a Ray
worker), forking with running gloo or gRPC threads may deadlock, and its last step is collective, between two training
steps. A thread avoids all of that: torch writes tensors without holding the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from miles_async.backends.megatron.host_buffer import HostBuffer
from miles_async.errors import CheckpointError
from miles_async.runtime.files.digests import DigestedFile

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
    from torch.distributed.checkpoint.metadata import Metadata

FORMAT, VERSION = "torch_dist", 1

# Errors of megatron and torch for files that cannot be written, read or understood. CheckpointException is a
# BaseException in torch 2.
FOREIGN_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    AssertionError,
    pickle.PickleError,
    CheckpointingException,
    CheckpointException,
)


class StagedSave:
    """A rank's part of a checkpoint that all ranks have planned together. Methods raise CheckpointError."""

    def __init__(self, directory: Path, state: ShardedStateDict, copies: HostBuffer | None) -> None:
        """Collective. ``state``: megatron's sharded state. ``copies``: where to copy it; if None, it must not change
        before :meth:`write` is through.
        """
        strategy = _Planner(FORMAT, VERSION, thread_count=1)
        filesystem_async._results_queue = queue.Queue()  # else megatron spawns a process for one, which nothing uses
        dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True, async_strategy="mcore")
        self._directory = directory
        self._writer, self._metadata = strategy.writer, strategy.metadata
        buckets = self._writer.write_buckets or []
        if copies is None:
            self._buckets = self._writer.preload_tensors(buckets, non_blocking=torch.cuda.is_available())
        else:
            self._buckets = _copied(buckets, copies)
        self._writer.write_buckets = None  # clones by Megatron of what was copied

    def write(self) -> bytes:
        """Write this rank's files, in any thread. Return its part of the index, and digests of the files."""
        written: list[WriteResult] = []
        digests: dict[str, str] = {}
        for path, name, (objects, tensors) in self._buckets:
            with as_checkpoint_error(f"cannot write {self._directory}"), DigestedFile(Path(path)) as file:
                for item, data in (*objects, *tensors):
                    result = _write_item(
                        self._writer.transforms, file, data, item, name, SerializationFormat.TORCH_SAVE
                    )
                    written.append(result)
                digests[name] = file.finish()
        return _encode(written, digests)

    def finish(self, parts: Sequence[bytes]) -> dict[str, str]:
        """Write the index, on rank 0, once all ranks have written. ``parts``: what each has returned.

        Returns digests of the ranks' files, by name.
        """
        decoded = [_decode(part) for part in parts]
        with as_checkpoint_error(f"cannot write {self._directory}"):
            self._writer.finish(self._metadata, [written for written, _ in decoded])
            save_config(CheckpointingConfig(FORMAT, VERSION), str(self._directory))
        return dict(ChainMap(*(digests for _, digests in decoded)))


class _Planner(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan: which rank writes what, and the index without places in files."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: tuple[FileSystemWriterAsync, Metadata | None, object], _: str
    ) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def _encode(written: Sequence[WriteResult], digests: Mapping[str, str]) -> bytes:
    entries = [(each.index, each.size_in_bytes, each.storage_data) for each in written]
    return msgspec.msgpack.encode((entries, digests))


def _decode(part: bytes) -> tuple[list[WriteResult], dict[str, str]]:
    entries, digests = msgspec.msgpack.decode(
        part,
        type=tuple[list[tuple[MetadataIndex, int, _StorageInfo]], dict[str, str]],
        dec_hook=lambda kind, numbers: kind(numbers),  # torch.Size
    )
    return [WriteResult(*entry) for entry in entries], digests


def _copied(buckets: list[WriteBucket], copies: HostBuffer) -> list[WriteBucket]:
    live = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]
    copy = iter(copies.copy(live))
    return [
        (path, key, (objects, [(item, next(copy)) for item, _ in tensors])) for path, key, (objects, tensors) in buckets
    ]


@contextlib.contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn errors about files, also of megatron and torch, into CheckpointError."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{what}: {_first_cause(error)}") from error


def _first_cause(error: BaseException) -> str:
    """Return the first cause of a failure, without torch's collection of tracebacks."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "a rank failed; rank 0 knows which and why"
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's only says that a file position is unexpected
        cause = cause.__cause__ or cause.__context__
    text = str(error := cause or error).strip()
    return text if isinstance(error, OSError | CheckpointingException) else f"{type(error).__name__}: {text}"
