"""Small exchanges over megatron's process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from miles_async.errors import MilesAsyncError, by_name
from miles_async.runtime.rank_records import broadcast_record, gather_records, gather_values

if TYPE_CHECKING:
    from torch.nn import Module

T = TypeVar("T")

Float64 = npt.NDArray[np.float64]
LOWEST = torch.finfo(torch.float64).min


def reduce_metrics(sums: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Reduce metrics over data-parallel ranks, for every pipeline stage. Collective. Returns float64 on the host.

    Names ending in ``_max`` by maximum, names ending in ``_log_sums`` by sum under the log, others by sum. Only the
    last pipeline stage passes metrics, with the same names and shapes on each of its ranks.
    """
    from megatron.core import parallel_state

    reduced: dict[str, Tensor] = {}
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group()
        values = {name: sums[name].detach().to(device, torch.float64) for name in sorted(sums)}
        largest = {name: value for name, value in values.items() if name.endswith(("_max", "_log_sums"))}
        largest = _all_reduced(largest, dist.ReduceOp.MAX, group)
        # -inf minus -inf is NaN
        shifts = {name: largest[name].clamp(min=LOWEST) for name in largest if name.endswith("_log_sums")}
        added = {
            name: (value - shifts[name]).exp() if name in shifts else value
            for name, value in values.items()
            if not name.endswith("_max")
        }
        added = _all_reduced(added, dist.ReduceOp.SUM, group)
        reduced = largest | added | {name: added[name].log() + shift for name, shift in shifts.items()}
    found = from_last_stage({name: value.cpu().numpy() for name, value in reduced.items()}, dict[str, Float64])
    return {name: torch.tensor(value) for name, value in found.items()}


def _all_reduced(values: Mapping[str, Tensor], operation: dist.ReduceOp, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Reduce float64 tensors, with the same names and shapes on each rank, in at most one collective."""
    if not values:
        return {}
    flat = torch.cat([value.flatten() for value in values.values()])
    dist.all_reduce(flat, op=operation, group=group)
    parts = flat.split([value.numel() for value in values.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def gather_from_replicas(values: Tensor) -> Tensor:
    """Concatenate the [n] of all data-parallel ranks, in their order; n may differ. Collective over that group."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    return values if group.size() == 1 else torch.cat(gather_values(values, group))


def complete_parameters(modules: Sequence[Module], *, always: bool = False) -> None:
    """Gather this rank's parameters now, with ``--overlap-param-gather`` or if ``always``. Collective over replicas.

    With that flag an optimizer step updates each rank's shard only, and the next forward pass gathers the rest. Any
    other reader of parameters calls this first; forward passes after it gather nothing, so ranks may run different
    ones.
    """
    module: Any  # Megatron's DistributedDataParallel
    for module in modules:
        if always or module.ddp_config.overlap_param_gather:
            module.start_param_sync(force_sync=True)


def from_last_stage(record: T, record_type: type[T]) -> T:
    """Broadcast a record of plain data and arrays from the last pipeline stage. Collective over the pipeline group."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    return record if group.size() == 1 else broadcast_record(record, record_type, source=group.size() - 1, group=group)


def together(work: Callable[[], T]) -> T:
    """Call ``work`` on every rank and return this rank's result. Collective.

    If it raises a MilesAsyncError on any rank, all ranks raise the first one, so none waits for a failed rank.
    """
    failures: list[tuple[str, str]] = []  # class in errors.py, message
    try:
        result = work()
    except MilesAsyncError as error:
        failures.append((type(error).__name__, str(error)))
    for kind, message in chain.from_iterable(gather_records(failures, list[tuple[str, str]])):
        raise (by_name(kind) or MilesAsyncError)(message)
    return result
