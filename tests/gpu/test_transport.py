"""Weights on their way out of a GPU: to pinned buckets, and to another process by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from miles_async.weights.export import into_buckets
from tests.gpu.figures import Figures, seconds_of

GIGABYTE = 10**9


def test_export_to_pinned_buckets_against_a_copy_on_the_device(figures: Figures) -> None:
    tensors = [(f"layers.{n}.weight", torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)) for n in range(64)]
    size = sum(tensor.nbytes for _, tensor in tensors)

    def export() -> None:
        for bucket in into_buckets(iter(tensors), 512 * 2**20):
            assert all(tensor.device.type == "cpu" for tensor in bucket.values())

    copies = seconds_of(lambda: [tensor.clone() for _, tensor in tensors], "cuda")
    figures.add(
        "export", pinned_gb_s=size / seconds_of(export, "cuda") / GIGABYTE, device_gb_s=size / copies / GIGABYTE
    )
    [bucket] = into_buckets(iter(tensors[:2]), 512 * 2**20)
    for name, tensor in tensors[:2]:
        assert bucket[name].is_pinned()
        assert torch.equal(bucket[name], tensor.cpu())


def _open(receive: Any, answer: Any) -> None:
    rebuild, arguments = receive.recv()
    tensor = rebuild(*arguments)
    answer.send(float(tensor.double().sum()))
    del tensor
    receive.recv()  # the sender has its answer


def test_another_process_opens_a_tensor_by_its_ipc_handle(figures: Figures) -> None:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    back, answer = context.Pipe(duplex=False)
    tensor = torch.arange(2**20, device="cuda", dtype=torch.float32)
    process = context.Process(target=_open, args=(theirs, answer), daemon=True)
    process.start()
    handle: tuple[Callable[..., Any], tuple[Any, ...]] = reduce_tensor(tensor)
    ours.send(handle)
    assert back.poll(60), "the other process did not answer"
    assert back.recv() == float(tensor.double().sum())
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
