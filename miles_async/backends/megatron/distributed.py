"""Set-up of torch.distributed and megatron's process groups, and small exchanges over them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from miles_async.errors import MilesAsyncError

T = TypeVar("T")


def initialise(store: dist.Store, *, rank: int, world_size: int, backend: str, timeout_minutes: float) -> None:
    """Create the default process group, before megatron-bridge would, which always chooses NCCL.

    ``timeout_minutes``: of one collective. After it gloo raises; NCCL's watchdog ends the process (torch 2.13,
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` 3), by which the run sees that the rank is lost.
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
    )


def reduce_metrics(sums: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Reduce metrics over data-parallel ranks (sum; maximum for names ending in ``_max``), for every pipeline stage.

    Collective. Only the last pipeline stage passes metrics: the same names and shapes on each of its ranks. Returns
    float64 on the host.
    """
    from megatron.core import parallel_state

    reduced: dict[str, Tensor] = {}
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group()
        for operation, suffixed in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
            names = sorted(name for name in sums if name.endswith("_max") is suffixed)
            if names:
                values = torch.cat([sums[name].detach().to(device, torch.float64).flatten() for name in names])
                dist.all_reduce(values, op=operation, group=group)
                parts = values.cpu().split([sums[name].numel() for name in names])
                reduced |= {name: part.view(sums[name].shape) for name, part in zip(names, parts, strict=True)}
    return from_last_stage(reduced)


def gather_from_replicas(values: Tensor) -> Tensor:
    """Concatenate the [n] of all data-parallel ranks, in their order; n may differ. Collective over that group."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return values
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    sizes = [int(one) for one in counts]
    padded = values.new_zeros(max(sizes))
    padded[: len(values)] = values
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return torch.cat([one[:size] for one, size in zip(received, sizes, strict=True)])


def from_last_stage(value: T) -> T:
    """Broadcast a picklable object from the last pipeline stage. Collective over the pipeline group."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def together(work: Callable[[], T]) -> list[T]:
    """Call ``work`` on every rank and return what each returned, on all of them. Collective.

    If it raises a MilesAsyncError anywhere, all ranks raise the first one: none waits for a rank that gave up.
    """
    try:
        mine: T | MilesAsyncError = work()
    except MilesAsyncError as error:
        mine = error
    results: list[T | MilesAsyncError] = [mine] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    done = [result for result in results if not isinstance(result, MilesAsyncError)]
    if len(done) < len(results):
        raise next(result for result in results if isinstance(result, MilesAsyncError))
    return done
