"""Micro-batches as the model and the loss read them. Layouts of ranks: test_megatron_layouts.py, test_positions.py."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from miles_async.backends.megatron.packing.pack import PackLayout, pack_batch
from miles_async.types import NOT_SHOWN
from tests.property.test_property_routing_replay import batch_of


def test_of_branches_whose_scores_are_wanted_the_tokens_are_found() -> None:
    batch = msgspec.structs.replace(batch_of([3, 1, 5]), shown=np.array([7, NOT_SHOWN, 2]))
    packed = pack_batch(batch, 0, PackLayout(), torch.device("cpu"))
    assert {branch: packed.batch.tokens[own].tolist() for branch, own in packed.shown.items()} == {
        7: [1, 2, 3],
        2: [5, 6, 7, 8, 9],
    }


def test_an_estimator_s_advantages_of_tokens_are_told_from_those_of_samples() -> None:
    """An own one may give either; for GAE they are rewards."""
    for advantages, per_token in (([0.5, 2.0], False), ([0, 1, 2, 0, 3], True)):
        batch = msgspec.structs.replace(batch_of([3, 2]), advantages=np.array(advantages, np.float32))
        packed = pack_batch(batch, 0, PackLayout(), torch.device("cpu"))
        assert packed.batch.per_token is per_token
