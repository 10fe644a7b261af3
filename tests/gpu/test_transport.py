"""Weights on their way out of a GPU: to pinned buckets, and to another process by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from miles_async.weights.slab import Slab
from tests.gpu.figures import Figures, seconds_of
from tests.gpu.ipc_reader import open_and_answer

GIGABYTE = 10**9


def test_copies_to_pinned_memory_against_copies_on_the_device(figures: Figures) -> None:
    tensors = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    size = sum(tensor.nbytes for tensor in tensors)
    slab = Slab(512 * 2**20)

    def copy() -> list[torch.Tensor]:
        slab.clear()
        copies = [slab.copy(tensor) for tensor in tensors]
        slab.copied()()
        return copies

    assert all(
        place.is_pinned() and torch.equal(place, tensor.cpu()) for place, tensor in zip(copy(), tensors, strict=True)
    )
    on_device = seconds_of(lambda: [tensor.clone() for tensor in tensors], "cuda")
    figures.add(
        "export", pinned_gb_s=size / seconds_of(copy, "cuda") / GIGABYTE, device_gb_s=size / on_device / GIGABYTE
    )


def test_the_next_step_changes_weights_while_they_are_copied() -> None:
    slab = Slab(128 * 2**20)
    weights = [torch.full((4096, 4096), float(number), device="cuda") for number in range(8)]  # two fill a chunk
    for version in range(3):
        slab.clear()
        copies = [slab.copy(weight) for weight in weights]
        wait = slab.copied()
        for weight in weights:
            weight.add_(100)
        torch.randn(8, 4096, 4096, device="cuda")  # takes memory that is free
        wait()
        assert [place.unique().tolist() for place in copies] == [[100 * version + number] for number in range(8)]


def test_another_process_opens_a_tensor_by_its_ipc_handle(figures: Figures) -> None:
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    back, answer = context.Pipe(duplex=False)
    tensor = torch.arange(2**20, device="cuda", dtype=torch.float32)
    process = context.Process(target=open_and_answer, args=(theirs, answer), daemon=True)
    process.start()
    handle: tuple[Callable[..., object], tuple[object, ...]] = reduce_tensor(tensor)
    ours.send(handle)
    assert back.poll(60), "the other process did not answer"
    assert back.recv() == float(tensor.double().sum())
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
