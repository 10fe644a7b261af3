"""Weights that are kept by version, and the model that has them for a while.

# covers: C12
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from miles_async.backends.megatron.kept_weights import KeptWeights


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
