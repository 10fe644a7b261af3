"""How fast digests of weights are computed: of whole tensors, as the trainer does when it stages them, and of the
memory where an engine holds rows or columns of one. ``memory`` is what numpy takes to add up the same bytes. Rates are
per second of one core's time, so that other processes matter little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tests.benchmarks.report import Row

SHAPES = ((64, 64), (2048, 768), (4096, 4096), (8192, 8192))
DTYPES = ("bfloat16", "float32")
SECONDS = 2.0  # at most, per figure


def rows() -> Iterator[Row]:
    """By shape and dtype of the tensor."""
    import torch

    torch.set_num_threads(1)
    for shape in SHAPES:
        for dtype in DTYPES:
            yield measure(shape, dtype)


def measure(shape: tuple[int, int], dtype: str) -> Row:
    import torch

    from miles_async.engines.sglang.region_digest import Region, region_digests
    from miles_async.runtime.tensor_digest import digest

    rows, columns = shape
    tensor = torch.randn(rows, columns).to(getattr(torch, dtype))
    raw = tensor.view(-1).view(torch.uint8).numpy()
    fused = torch.cat([tensor, tensor])[:rows]  # a part of a larger parameter
    shard = tensor[:, : columns // 2].clone()
    return {
        "shape": f"{rows} × {columns}",
        "dtype": dtype,
        "whole_gb_s": rate(tensor.nbytes, lambda: digest(raw, tensor.itemsize, shape)),
        "rows_gb_s": rate(tensor.nbytes, lambda: region_digests([Region(fused, 0, tensor.stride(), columns)])),
        "columns_gb_s": rate(shard.nbytes, lambda: region_digests([Region(shard, 0, tensor.stride(), columns)])),
        "memory_gb_s": rate(tensor.nbytes, lambda: raw.view("int64").sum()),
    }


def rate(size: int, work: Callable[[], object]) -> float:
    """GB per second, best of several."""
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return round(size / best / 1e9, 2)
