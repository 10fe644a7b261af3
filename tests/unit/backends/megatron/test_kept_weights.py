"""Weights that are kept by version, and the model that has them for a while.

# covers: C12
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_async.backends.megatron.host_buffer import HostBuffer
from miles_async.backends.megatron.kept_weights import KeptWeights
from tests.fakes.fake_gpu import FakeGpu


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("bias", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def set(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (self.trained, self.frozen, self.bias, self.steps):
                tensor.fill_(value)

    @property
    def values(self) -> list[float]:
        return [float(tensor.detach().flatten()[0]) for tensor in (self.trained, self.frozen, self.bias, self.steps)]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def kept(model: Model) -> KeptWeights:
    """Versions 3, 4 and 6 of 2 to 6, whose weights are the versions' numbers; the model has 7."""
    kept = KeptWeights(modules=[model], most=3)
    for version in (2, 3, 4, 6):
        model.set(version)
        kept.keep(version)
    model.set(7)
    return kept


def test_the_model_has_the_weights_of_a_version_and_then_its_own_again(model: Model, kept: KeptWeights) -> None:
    """What is not trained stays as it is all the time."""
    for version in (4, 3, 6):
        with kept.at(version):
            assert model.values == [version, 7, version, 7]
        assert model.values == [7, 7, 7, 7]


def test_an_error_inside_leaves_the_model_with_its_own_weights(model: Model, kept: KeptWeights) -> None:
    with pytest.raises(ZeroDivisionError), kept.at(3):
        raise ZeroDivisionError
    assert model.values == [7, 7, 7, 7]


def test_the_oldest_versions_are_forgotten(kept: KeptWeights) -> None:
    assert sorted(kept.of_version) == [3, 4, 6]


def test_a_version_that_is_not_kept_is_scored_by_the_next_one(kept: KeptWeights) -> None:
    def scoring(*versions: int) -> list[int]:
        found: Tensor = kept.scoring(torch.tensor(versions, dtype=torch.int64))
        return found.tolist()

    assert scoring(3, 4, 6) == [3, 4, 6]
    assert scoring(-1, 0, 2, 5) == [3, 3, 3, 6]
    assert scoring() == []


def test_a_version_takes_the_memory_of_the_one_that_it_replaces(model: Model, kept: KeptWeights) -> None:
    places = [tensor.data_ptr() for tensor in kept.of_version[3]]
    model.set(8)
    kept.keep(8)
    assert [tensor.data_ptr() for tensor in kept.of_version[8]] == places
    kept.keep(8)
    assert sorted(kept.of_version) == [4, 6, 8], "the same version once more replaces itself"
    with kept.at(4):
        assert model.values == [4, 8, 4, 8]


class GpuTensor(Tensor):
    """A tensor that says it is on the GPU. What is copied from it is copied when its stream comes to that."""

    is_cuda = True
    gpu: FakeGpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and kwargs == {"non_blocking": True}:
            place, tensor = (each.as_subclass(Tensor) for each in args)
            cls.gpu.active.queue.append(lambda: place.copy_(tensor))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def test_copies_of_a_gpu_are_pinned_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    GpuTensor.gpu = FakeGpu()
    GpuTensor.gpu.install(monkeypatch)
    asked = []

    def memory(size: int, *, pinned: bool) -> Tensor:
        asked.append((size, pinned))
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr("miles_async.backends.megatron.host_buffer._host_memory", memory)
    buffer = HostBuffer()
    (copy,) = buffer.copy([torch.ones(3).as_subclass(GpuTensor)])  # type: ignore[list-item]
    assert copy.tolist() == [1, 1, 1]
    small, other = buffer.copy([torch.full((2,), each).as_subclass(GpuTensor) for each in (2.0, 3.0)])  # type: ignore[misc]
    assert (small.tolist(), other.tolist()) == ([2, 2], [3, 3])
    assert asked == [(64, True), (128, True)], "more room is asked for only where the memory does not suffice"
    buffer.copy([torch.ones(3).as_subclass(GpuTensor)])  # type: ignore[list-item]
    assert len(asked) == 2
