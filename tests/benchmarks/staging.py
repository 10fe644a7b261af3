"""How long staging holds up training, against a plain copy of the same weights into memory that was touched before.

The real staging of one sending rank: training waits for the copy; digests, changes and files are another thread's.
``blocked_beyond_copy`` is what the goal bounds. ``training_speed_beside`` is the share of its speed that a thread which
multiplies matrices keeps while the other one works; each needs a core of its own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from miles_async.arguments.weights import DeltaEncoding
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from tests.benchmarks.report import Row

WIDTH, MATRICES = 2048, 119  # 500 M parameters
BUCKET_BYTES = 256 * 2**20
VERSIONS = 3  # after the first, for which memory is taken from the system; the best is shown
CHANGED = 0.02  # of all elements from version to version
ALLOWED_SECONDS = 0.2
CASES: tuple[tuple[torch.dtype, DeltaEncoding | None], ...] = (
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.bfloat16, "xor"),
)


_M_MMAP_THRESHOLD = -3  # malloc.h


class AnonymousMemory:
    """Of this process, above what it was at the start: the pages of files that it maps can be dropped at any time."""

    def __init__(self) -> None:
        self.above = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> AnonymousMemory:
        libc = ctypes.CDLL(None)
        # Larger blocks go back to the system when they are freed. By itself glibc raises that size up to 32 MiB as it
        # sees such blocks freed, and keeps some of what is freed from then on.
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
        libc.malloc_trim(0)  # what was freed, and would be used again unseen
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.above = max(self.above, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def rows(width: int = WIDTH, matrices: int = MATRICES) -> Iterator[Row]:
    """One per dtype and encoding of changes. ``width`` and ``matrices``: of the model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype, delta in CASES:
            yield measure(width, matrices, dtype, delta)
    finally:
        torch.set_num_threads(threads)


def measure(width: int, matrices: int, dtype: torch.dtype, delta: DeltaEncoding | None) -> Row:
    model = {f"layers.{index}.linear.weight": torch.randn(width, width).to(dtype) for index in range(matrices)}
    total_bytes = sum(tensor.nbytes for tensor in model.values())
    places = [tensor.clone() for tensor in model.values()]
    alone = multiplications(partial(_before, time.monotonic() + 1.0))
    staging = Staging(StagingOptions(bucket_bytes=BUCKET_BYTES, keep=1, version_bytes=total_bytes, delta=delta))
    plain, blocked, staged, beside = [], [], [], []
    with AnonymousMemory() as memory, ThreadPoolExecutor(1) as weights_thread:
        for version in range(1 + VERSIONS):
            for tensor in model.values():
                tensor.view(-1)[:: round(1 / CHANGED)] *= 1 + 2**-7
            plain.append(seconds(partial(_copy, model.values(), places)))
            blocked.append(seconds(partial(staging.copy, version, model.items())))
            under_way = weights_thread.submit(seconds, partial(staging.stage, version))
            beside.append(multiplications(partial(_not, under_way.done)))
            staged.append(under_way.result())
    staging.close()
    copied, held_up = min(plain[1:]), min(blocked[1:])
    return {
        "parameters": round(total_bytes / dtype.itemsize / 1e6),
        "dtype": str(dtype).removeprefix("torch."),
        "delta": delta or "off",
        "plain_copy_seconds": round(copied, 3),
        "blocked_seconds": round(held_up, 3),
        "blocked_first_seconds": round(blocked[0], 3),
        "blocked_beyond_copy": round(held_up - copied, 3),
        "meets_goal": held_up - copied <= ALLOWED_SECONDS,
        "beside_training_seconds": round(min(staged[1:]), 3),
        "training_speed_beside": round(max(beside) / alone, 2),
        "memory_in_copies": round(memory.above / total_bytes, 2),
    }


def multiplications(go_on: Callable[[], bool]) -> float:
    """Matrices multiplied per second as long as ``go_on`` says so."""
    matrix, count, started = torch.ones(256, 256), 0, time.perf_counter()
    while go_on():
        torch.mm(matrix, matrix)
        count += 1
    return count / (time.perf_counter() - started)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _copy(tensors: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)


def _before(moment: float) -> bool:
    return time.monotonic() < moment


def _not(done: Callable[[], bool]) -> bool:
    return not done()
