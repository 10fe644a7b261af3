"""Attention of many requests at once, against each request's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_async.engines.sglang.cpu import attention
from miles_async.engines.sglang.cpu.attention import attend

KV_HEADS, SIZE = 3, 8


def reference(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float, softcap: float
) -> Tensor:
    """One request's last tokens, in float64. ``query``: [new, heads, size], the others: [length, kv heads, size]."""
    heads = query.shape[1] // keys.shape[1]
    keys, values = (held.double().repeat_interleave(heads, 1) for held in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", query.double(), keys) * scaling
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))  # how far a key is
    hidden = (behind < 0) | (behind > (len(keys) if window is None else window))
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def error(
    lengths: list[int],
    new: list[int],
    *,
    common: int = 0,
    heads: int = 6,
    window: int | None = None,
    scaling: float | None = None,
    dtype: torch.dtype = torch.float32,
    latent: int | None = None,
    softcap: float = 0.0,
    moved: bool = False,
) -> float:
    """The largest difference from the reference. All requests begin with the same ``common`` tokens. ``latent``: one
    vector is all heads' key, and as many of its first elements their value. ``moved``: caches have tokens in
    other places than the table says.
    """
    requests, longest = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, requests * longest, KV_HEADS, SIZE, generator=generator).to(dtype)
    if latent is not None:
        keys = keys[:, :1]
        values = keys[..., :latent]
    slots = torch.randperm(requests * longest, generator=generator).view(requests, longest).int()
    slots[:, :common] = slots[0, :common].clone()
    order = torch.randperm(requests, generator=generator)  # requests are in any rows of the table
    table = torch.zeros_like(slots)
    table[order] = slots
    places_of = torch.randperm(keys.shape[0], generator=generator) if moved else None
    if places_of is not None:
        slots = places_of[slots.long()]
    query = torch.randn(sum(new), heads, SIZE, generator=generator).to(dtype)
    output = query.new_full((*query.shape[:2], values.shape[-1]), torch.nan)
    arguments = (query, output, keys, values, table, order, torch.tensor(lengths), torch.tensor(new))
    assert attend(*arguments, scaling=scaling, window=window, softcap=softcap, places_of=places_of) is output
    expected = torch.cat(
        [
            reference(asked, keys[held[:length]], values[held[:length]], window, scaling or SIZE**-0.5, softcap)
            for asked, held, length in zip(query.split(new), slots, lengths, strict=True)
        ]
    )
    return float((output - expected).abs().max())


@pytest.mark.parametrize("common", [0, 1, 4])
@pytest.mark.parametrize("heads", [KV_HEADS, 3 * KV_HEADS])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_every_token_is_mixed_as_in_a_request_of_its_own(common: int, heads: int, scaling: float | None) -> None:
    lengths, new = [9, 5, 17, 6, 60, 7, 5], [3, 1, 2, 1, 50, 3, 1]
    assert error(lengths, new, common=common, heads=heads, scaling=scaling) < 1e-6


@pytest.mark.parametrize("common", [0, 4])
def test_a_latent_vector_is_key_and_value_of_all_heads(common: int) -> None:
    assert error([9, 5, 17, 6, 60], [3, 1, 2, 1, 50], common=common, latent=5) < 1e-6


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("window", [0, 3, 8, 100])
def test_a_token_sees_no_further_than_its_window(window: int, moved: bool) -> None:
    assert error([9, 5, 17, 6], [3, 1, 2, 1], common=4, window=window, moved=moved) < 1e-6


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("lengths", "new"), [([60], [60]), ([60], [50]), ([9, 5, 17, 6, 60], [3, 1, 2, 1, 50])])
def test_scores_are_softcapped(lengths: list[int], new: list[int], window: int | None) -> None:
    assert error(lengths, new, common=min(4, lengths[0] - new[0]), window=window, softcap=0.5) < 1e-6


@pytest.mark.parametrize("lengths", [[1], [40], [7, 7, 7, 7], [1, 1]])
def test_nothing_of_a_prompt_is_cached(lengths: list[int]) -> None:
    assert error(lengths, lengths) < 1e-6


def test_half_precision_is_mixed_in_single_precision() -> None:
    assert error([20] * 16, [1] * 16, common=10, dtype=torch.bfloat16) < 2**-8  # one rounding of numbers up to 2


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 19])
def test_as_many_are_computed_together_as_may_be(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    together = attention._together

    def counted(query: Tensor, *others: Tensor) -> Tensor:
        sizes.append(len(query))
        return together(query, *others)

    monkeypatch.setattr(attention, "_AT_ONCE", at_once)
    monkeypatch.setattr(attention, "_together", counted)
    # 6 heads × (12 common tokens + 4) = 96 scores of a request and 4 × 6 × 8 = 192 elements of its own keys.
    assert error([16] * 40, [1] * 40, common=12) < 1e-6
    assert sizes == {1: [], 3000: [15, 15, 10], 1 << 19: [40]}[at_once]


def test_a_long_request_is_not_computed_with_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    heads_first = attention._heads_first

    def counted(held: Tensor, places: Tensor) -> Tensor:
        sizes.append(tuple(places.shape))
        return heads_first(held, places)

    monkeypatch.setattr(attention, "_heads_first", counted)
    assert error([100, 9, 10, 11, 12], [1] * 5, common=4) < 1e-6
    assert sizes[2:] == [(4, 1), (4, 8), (4, 8), (1, 1), (1, 100), (1, 100)]
