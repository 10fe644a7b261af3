"""Mamba-2 of packed sequences: each sequence's own convolution and recurrence, with their gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from torch import Tensor
from torch.nn.functional import silu, softplus

from miles_async.backends.megatron.host.mamba import GroupNorm, partitioned_indices, split_conv1d_scan
from tests.fakes.gated_delta import convolution
from tests.fakes.mamba import recurrence
from tests.unit.backends.megatron.host.test_gated_delta import ENDS, compare, drawn

HEADS, SIZE, GROUPS, STATE, TAPS = 4, 3, 2, 5, 4
WIDTH, KEYS = HEADS * SIZE, GROUPS * STATE


def plainly(packed: Tensor, weight: Tensor, dt_bias: Tensor, a_log: Tensor, skip: Tensor) -> Tensor:
    """One sequence, [n, ...] → [n, width]."""
    gate, mixed, dt = packed.split([WIDTH, WIDTH + 2 * KEYS, HEADS], -1)
    value, key, query = convolution(mixed, weight).split([WIDTH, KEYS, KEYS], -1)
    key, query = (part.unflatten(-1, (GROUPS, STATE)).repeat_interleave(HEADS // GROUPS, 1) for part in (key, query))
    value, step = value.unflatten(-1, (HEADS, SIZE)), softplus(dt + dt_bias)
    return recurrence(value, step, -a_log.exp(), key, query, skip)[0].flatten(1) * silu(gate)


@pytest.mark.parametrize("packed", [True, False])
def test_what_follows_the_first_product_is_each_sequences_own(packed: bool) -> None:
    ends = ENDS if packed else [0, ENDS[-1]]
    sizes = [(ends[-1], 2 * WIDTH + 2 * KEYS + HEADS), (WIDTH + 2 * KEYS, TAPS), (HEADS,), (HEADS,), (HEADS,)]
    inputs = [drawn(*size, seed=seed) for seed, size in enumerate(sizes)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    tokens, weight, dt_bias, a_log, skip = inputs
    numbers = torch.arange(len(ends) - 1).repeat_interleave(torch.tensor(ends).diff())[None].int()
    found = split_conv1d_scan(
        tokens[None],
        weight,
        torch.zeros(len(weight)),
        dt_bias,
        -a_log.exp(),
        skip,
        chunk_size=128,
        headdim=SIZE,
        ngroups=GROUPS,
        seq_idx=numbers if packed else None,
    )[0]
    expected = torch.cat([plainly(exact[0][start:end], *exact[1:]) for start, end in pairwise(ends) if end > start])
    compare(found, expected, inputs, exact, rtol=1e-5, atol=1e-5, of_gradients=3e-5)


def test_groups_are_normalised_alone() -> None:
    norm = GroupNorm(6, eps=1e-5, group_size=3, dtype=torch.float32)
    x = drawn(2, 6, seed=1)
    expected = torch.cat([torch.nn.functional.rms_norm(part, (3,), eps=1e-5) for part in x.split(3, -1)], -1)
    torch.testing.assert_close(norm(x), expected)


def test_context_parallel_ranks_have_a_part_of_each_half() -> None:
    """As Transformer Engine's function, by its description."""
    ends = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert [partitioned_indices(ends, 12, 2, rank).tolist() for rank in range(2)] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]


def test_megatron_calls_the_stand_ins() -> None:
    assert mamba_mixer.mamba_split_conv1d_scan_combined is split_conv1d_scan
    assert mamba_mixer.ExtendedRMSNorm is GroupNorm
    assert mamba_context_parallel.tex.thd_get_partitioned_indices is partitioned_indices
