"""Write megatron checkpoints from the process that holds the tensors.

megatron-core 0.16 spawns a queue manager and forks a writer per file even for a synchronous save. The spawn imports
``__main__`` again (seconds, and wrong inside a Ray worker), and forking a process with running gloo or gRPC threads may
deadlock. A save that waits for its own completion gains nothing from either.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy


class InProcessWriter(filesystem_async.FileSystemWriterAsync):
    """Writes the files of one rank in turn; results go where megatron expects them."""

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: Sequence[object], use_msc: bool, rank: int, write_buckets: Sequence[object], results_queue: Any
    ) -> None:
        written: dict[int, object] = {}
        for index, bucket in enumerate(write_buckets):
            results: queue.Queue[tuple[int, object]] = queue.Queue()
            pending: queue.Queue[int] = queue.Queue()
            pending.put(index)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transform_list, index, bucket, results, pending, use_fsync=True, use_msc=use_msc
            )
            _, outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                results_queue.put(_reason(outcome))
                return
            written[index] = outcome
        results_queue.put(written)


def _reason(error: BaseException) -> BaseException:
    """Find the system's error behind torch's, which only says that a file position is unexpected."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


@contextlib.contextmanager
def writing_in_process() -> Iterator[None]:
    """Make saves inside the context use :class:`InProcessWriter`."""
    writer, results = torch_strategy.FileSystemWriterAsync, filesystem_async._results_queue
    torch_strategy.FileSystemWriterAsync = InProcessWriter
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        torch_strategy.FileSystemWriterAsync, filesystem_async._results_queue = writer, results
