"""What a model says that it holds, as its loader copies tensors into parameters and something replaces them after."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from miles_async.engines.held_weights import HeldWeights
from miles_async.tensor_digest import digest, total
from miles_async.types import HeldPart


class Fused(torch.nn.Module):
    """Holds q and k in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.qk.data[:4].copy_(tensor) if name == "q" else self.qk.data[4:].copy_(tensor)


@pytest.fixture
def model() -> Fused:
    return Fused()


WEIGHTS = {"q": torch.randn(4, 4), "k": torch.randn(2, 4)}
EXPECTED = {name: digest(tensor.reshape(-1).view(torch.uint8).numpy(), 4) for name, tensor in WEIGHTS.items()}


def found(held: HeldWeights) -> dict[str, str]:
    """Total digests of what is held; "" where nothing is."""
    parts = {name: msgspec.json.decode(text, type=list[HeldPart]) for name, text in held.digests().items()}
    return {name: total(part.digest for part in some) if some else "" for name, some in parts.items()}


def test_parts_of_a_fused_parameter_are_what_was_loaded(model: Fused) -> None:
    # covers: C8
    held = HeldWeights(model)
    model.load_weights(WEIGHTS.items())
    assert found(held) == EXPECTED
    model.qk.data[5, 1] += 1
    assert found(held) == {"q": EXPECTED["q"], "k": found(held)["k"]}
    assert found(held)["k"] != EXPECTED["k"]


def test_what_is_replaced_after_loading_is_neither_held_nor_kept_alive(model: Fused) -> None:
    # covers: M16
    held = HeldWeights(model)
    model.load_weights(WEIGHTS.items())
    loaded = StorageWeakRef(model.qk.untyped_storage())
    model.qk.data = model.qk.data.to(torch.int8)
    assert loaded.expired()
    assert found(held) == {"q": "", "k": ""}


def test_memory_that_shrank_is_not_read(model: Fused) -> None:
    held = HeldWeights(model)
    model.load_weights(WEIGHTS.items())
    model.qk.untyped_storage().resize_(4 * 4 * 4)
    assert found(held) == {"q": EXPECTED["q"], "k": ""}
