"""The copy of exported weights: exact, apart from the trainer's, in memory that is used again; on a GPU, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_async.weights.slab import Slab
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from tests.fakes.fake_gpu import FakeGpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (65,), (300,)])
def test_copies_are_equal_contiguous_and_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    tensor = tensor.t() if tensor.ndim == 2 else tensor
    slab = Slab(1000)
    copies = [slab.copy(tensor) for _ in range(4)]  # (300,) needs a chunk of its own
    slab.copied()()
    for copy in copies:
        assert copy.is_contiguous()
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)
    copies[0].fill_(1)
    assert all(torch.equal(copy, tensor) for copy in copies[1:])


def test_the_next_version_takes_no_new_memory() -> None:
    slab = Slab(64)
    sizes = (12, 4, 40, 1, 16)
    places = []
    for version in range(3):
        slab.clear()
        copies = [slab.copy(torch.full((size,), float(version))) for size in sizes]
        assert [copy.tolist() for copy in copies] == [[float(version)] * size for size in sizes]
        places.append([copy.data_ptr() for copy in copies])
    assert places[0] == places[1] == places[2]
    slab.clear()
    assert slab.copy(torch.ones(30)).tolist() == [1] * 30, "another layout finds room, too"


# ------------------------------------------------------------------------------------------------ on a GPU
class GpuTensor(Tensor):
    """A tensor that says it is on the GPU. What is copied from it is copied when its stream comes to that."""

    is_cuda = True
    gpu: FakeGpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            assert cls.gpu.active is cls.gpu.training
            original, duplicate = args[0].as_subclass(Tensor), torch.empty(args[0].shape, dtype=args[0].dtype)
            cls.gpu.training.queue.append(lambda: Tensor.copy_(duplicate, original))
            return duplicate.as_subclass(GpuTensor)
        if func is Tensor.copy_:
            place, tensor = args
            assert kwargs == {"non_blocking": True}
            cls.gpu.active.queue.append(lambda: Tensor.copy_(place, tensor.as_subclass(Tensor)))
            return place
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = GpuTensor.gpu = FakeGpu()
    made.install(monkeypatch)
    monkeypatch.setattr(
        "miles_async.weights.slab._memory", lambda size, pinned: torch.zeros(size, dtype=torch.uint8) if pinned else 1
    )
    return made


@pytest.mark.parametrize("first", ["training", "reader"])
def test_copies_are_of_what_was_exported_and_nobody_waits_for_them(gpu: FakeGpu, first: str) -> None:
    """The export's kernels come before the copies, and the next step may change what is being copied."""
    slab = Slab(1000)
    weight = torch.zeros(5)
    gpu.training.queue.append(lambda: weight.fill_(1))  # the export
    copy = slab.copy(weight.as_subclass(GpuTensor))  # type: ignore[arg-type]
    wait = slab.copied()
    gpu.training.queue.append(lambda: weight.fill_(2))  # the next step
    assert gpu.done == {"training": 0, "copies": 0}
    if first == "training":
        gpu.training.run(len(gpu.training.queue))
        assert weight.tolist() == [2] * 5
        assert gpu.done["copies"] == 0
    wait()
    assert copy.tolist() == [1] * 5


def test_what_is_staged_is_waited_for(gpu: FakeGpu, tmp_path: Path) -> None:
    staging = Staging(StagingOptions(parent=tmp_path, bucket_bytes=100))
    staging.copy(0, [("linear.weight", torch.ones(5).as_subclass(GpuTensor))])  # type: ignore[arg-type]
    assert gpu.done["copies"] == 0
    staging.stage(0)
    assert staging.bucket(0, 0).clone().view(torch.float32).tolist() == [1] * 5
    staging.close()


def test_duplicates_are_held_until_they_are_copied_and_a_chunk_of_them_at_most(gpu: FakeGpu) -> None:
    """Their memory would be given to what comes next on training's stream."""
    slab = Slab(128)

    def copy(value: int) -> int:
        """The number of duplicates afterwards."""
        slab.copy(torch.full((8,), float(value)).as_subclass(GpuTensor))  # type: ignore[arg-type]
        assert slab._gpu is not None
        return len(slab._gpu._duplicates)

    assert [copy(value) for value in range(2)] == [1, 2]
    gpu.training.run(len(gpu.training.queue))
    assert gpu.done["copies"] == 0
    assert copy(2) == 1  # in a chunk of its own
    gpu.training.run(len(gpu.training.queue))
    assert gpu.done["copies"] == 4  # both of the chunk before, each after it waited for its duplicate
    wait = slab.copied()
    assert slab._gpu is not None
    assert len(slab._gpu._duplicates) == 1
    wait()
    assert gpu.done["copies"] == len(slab._gpu._stream.queue)
    assert not slab._gpu._duplicates


def test_the_next_version_waits_for_copies_that_nobody_waited_for(gpu: FakeGpu) -> None:
    slab = Slab(128)
    slab.copy(torch.ones(8).as_subclass(GpuTensor))  # type: ignore[arg-type]
    slab.clear()
    assert slab._gpu is not None
    assert not slab._gpu._duplicates
    gpu.training.run(len(gpu.training.queue))
    assert gpu.done["copies"] == len(slab._gpu._stream.queue) > 0
