"""Changes between two versions of a tensor: exact in both encodings, small when little changed."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.weights.delta import Bytes, ChangedTensor, apply, encode

ENCODINGS: list[Literal["xor", "overwrite"]] = ["xor", "overwrite"]


def applied(changed: ChangedTensor, old: Bytes) -> Bytes:
    content = old.copy()
    apply(changed, content)
    return content


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data())
def test_a_change_makes_the_new_version_of_the_old_one(
    encoding: Literal["xor", "overwrite"], data: st.DataObject
) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    elements = data.draw(st.integers(1, 70))
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    old = draw.integers(0, 256, elements * itemsize).astype(np.uint8)
    new = old.copy()
    places = data.draw(st.sets(st.integers(0, len(old) - 1), min_size=1, max_size=20))
    new[list(places)] ^= 1 + draw.integers(0, 255, len(places)).astype(np.uint8)
    changed = encode("w", old, new, itemsize, encoding)
    assert changed is not None
    assert np.array_equal(applied(changed, old), new)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_tensors_of_several_blocks(encoding: Literal["xor", "overwrite"], itemsize: int) -> None:
    draw = np.random.default_rng(itemsize)
    old = draw.integers(0, 256, 300_003 * itemsize).astype(np.uint8)
    new = old.copy()
    new[draw.choice(len(new), 5000, replace=False)] ^= 0x80
    changed = encode("w", old, new, itemsize, encoding)
    assert changed is not None
    assert np.array_equal(applied(changed, old), new)
    last = old.copy()
    last[-1] ^= 1
    changed = encode("w", old, last, itemsize, encoding)
    assert changed is not None
    assert np.array_equal(applied(changed, old), last)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_unchanged_elements_are_not_sent(encoding: Literal["xor", "overwrite"]) -> None:
    old = np.arange(64, dtype=np.uint8)
    assert encode("w", old, old.copy(), 4, encoding) is None
    assert encode("empty", old[:0], old[:0], 4, encoding) is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_few_changes_are_small(encoding: Literal["xor", "overwrite"]) -> None:
    """bfloat16 after a small optimizer step: one element in a hundred."""
    draw = np.random.default_rng(0)
    old = draw.integers(0, 1 << 16, 100_000).astype(np.uint16)
    new = old.copy()
    new[draw.choice(len(new), 1000, replace=False)] ^= 1
    changed = encode("w", old.view(np.uint8), new.view(np.uint8), 2, encoding)
    assert changed is not None
    assert len(changed.data) < 0.03 * old.nbytes
