"""Digests of what engines hold against what was staged: every way to be wrong is found, and no way to shard is one."""

from __future__ import annotations

import msgspec
import pytest
import torch

from miles_async.engines.held_weights import region_digest
from miles_async.tensor_digest import digest
from miles_async.types import HeldPart, StagedWeights, TensorMeta
from miles_async.weights.verify import digest_disagreement

Weights = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (64, 64), "experts.0.up": (32, 64), "experts.1.up": (32, 64), "norm": (64,), "scale": ()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def staged(sent: Weights) -> StagedWeights:
    def describe(name: str, tensor: torch.Tensor) -> TensorMeta:
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return TensorMeta(name, str(tensor.dtype)[6:], tuple(tensor.shape), digest(raw, tensor.itemsize))

    bucket = tuple(describe(name, tensor) for name, tensor in sent.items())
    return StagedWeights(version=1, directory="", buckets={0: bucket}, total_bytes=0)


def part(tensor: torch.Tensor, offset: int = 0, strides: tuple[int, ...] | None = None) -> HeldPart:
    strides = tensor.contiguous().stride() if strides is None else strides
    return HeldPart(offset, tuple(tensor.shape), strides, str(tensor.dtype)[6:], region_digest(tensor, offset, strides))


def held(found: Weights) -> dict[str, list[HeldPart]]:
    return {name: [part(tensor)] for name, tensor in found.items()}


def test_the_same_weights_agree() -> None:
    assert digest_disagreement(staged(weights()), held(weights())) is None


def one_element(found: Weights) -> None:
    found["q"][17, 3] += 1e-6


def a_transposed_matrix(found: Weights) -> None:
    found["q"] = found["q"].t().contiguous()


def swapped_experts(found: Weights) -> None:
    found["experts.0.up"], found["experts.1.up"] = found["experts.1.up"], found["experts.0.up"]


def swapped_rows(found: Weights) -> None:
    found["q"][[0, 1]] = found["q"][[1, 0]]


def a_stale_tensor(found: Weights) -> None:
    found["norm"] = weights(seed=1)["norm"]


@pytest.mark.parametrize("corrupt", [one_element, a_transposed_matrix, swapped_experts, swapped_rows, a_stale_tensor])
def test_every_corruption_is_found(corrupt: object) -> None:
    # covers: C8
    found = weights()
    corrupt(found)  # type: ignore[operator]
    reason = digest_disagreement(staged(weights()), held(found))
    assert reason is not None
    assert "has other elements than were sent" in reason


def test_a_tensor_that_no_rank_holds_is_found() -> None:
    parts = held(weights())
    del parts["norm"]
    reason = digest_disagreement(staged(weights()), parts)
    assert reason is not None
    assert "norm has 64 elements, of which 0 are held" in reason
    assert digest_disagreement(staged(weights()), parts, skip=["nor"]) is None


def test_another_dtype_is_found() -> None:
    parts = held(weights())
    parts["norm"] = [part(weights()["norm"].to(torch.bfloat16))]
    assert "norm was sent as float32 and is held as bfloat16" in str(digest_disagreement(staged(weights()), parts))


def sharded(tensor: torch.Tensor, dimension: int) -> list[HeldPart]:
    half = tensor.shape[dimension] // 2
    pieces = [tensor.narrow(dimension, start, half) for start in (0, half)]
    return [part(piece.clone(), piece.storage_offset(), piece.stride()) for piece in pieces]


@pytest.mark.parametrize("dimension", [0, 1])
def test_shards_of_several_ranks_are_one_tensor(dimension: int) -> None:
    parts = held(weights())
    parts["q"] = sharded(weights()["q"], dimension)
    assert digest_disagreement(staged(weights()), parts) is None
    assert "of which 2048 are held" in str(digest_disagreement(staged(weights()), {**parts, "q": parts["q"][:1]}))


def test_ranks_that_hold_the_same_part_have_to_agree() -> None:
    parts = held(weights())
    parts["norm"] *= 2
    assert digest_disagreement(staged(weights()), parts) is None
    parts["norm"][1] = msgspec.structs.replace(parts["norm"][1], digest="0" * 16)
    assert "norm is not the same on all ranks" in str(digest_disagreement(staged(weights()), parts))
