"""An engine's end of the weight transport, without the engine: joins and receives as SGLang does."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor

from miles_async.types import TensorMeta

Load = Callable[[list[tuple[str, Tensor]]], tuple[bool, str]]
"""Takes the tensors of a bucket: whether that worked, and why not."""


def import_all() -> None:
    """Does nothing in a process that has imported this module."""


def receive(
    address: str, port: int, group_name: str, rank: int, world_size: int, buckets: tuple[tuple[TensorMeta, ...], ...]
) -> dict[str, object]:
    """Runs in a process of its own. Name → numpy array of everything broadcast."""
    import torch

    torch.set_num_threads(1)
    # SGLang insists on a default process group, its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = init_custom_process_group(address, port, group_name, rank, world_size)
    received = {}
    for bucket in buckets:
        sizes = [math.prod(meta.shape) * getattr(torch, meta.dtype).itemsize for meta in bucket]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=group)
        for meta, part in zip(bucket, data.split(sizes), strict=True):
            received[meta.name] = part.view(getattr(torch, meta.dtype)).reshape(meta.shape).numpy()
    dist.destroy_process_group(group)
    return received


def stream_manager(groups: dict[str, object], load: Load) -> object:
    """SGLang's SchedulerWeightUpdaterManager, as far as a stream (``weight_stream.py``) needs it."""
    runner = SimpleNamespace(
        weight_updater=SimpleNamespace(
            device="cpu",
            _model_update_group=groups,
            load_weights_from_distributed=load,
            destroy_weights_update_group=lambda name: dist.destroy_process_group(groups.pop(name)),
        )
    )
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), _select_runners=lambda: [("target", runner)])


def init_custom_process_group(
    address: str,
    port: int,
    group_name: str,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta = datetime.timedelta(seconds=120),
) -> object:
    """sglang.srt.utils.common.init_custom_process_group (0.5.23), for one backend."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
