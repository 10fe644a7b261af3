"""``tensor_digest`` of memory that holds a part of a tensor: any view of it, on the device where it lies."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import batched

import numpy as np
import torch
from torch import Tensor

from miles_async.runtime.tensor_digest import (
    HALF,
    MODULUS,
    WORD,
    Words,
    row_multipliers,
    to_text,
    word_multipliers,
    words_digest,
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART_BYTES = 32 << 20  # at a time: intermediate results take as much again


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that holds a part of a tensor with rows of ``row_length`` elements: those at offset + Σ index · stride,
    counted row by row.
    """

    memory: Tensor
    offset: int
    strides: tuple[int, ...]
    row_length: int


def region_digests(regions: Iterable[Region]) -> list[str]:
    """The share of each region in its tensor's digest, launched for all of them before the first is waited for.

    Regions that differ only in their memory, like a layer's experts, are read together on a GPU: a launch per
    region would take longer than reading it.
    """
    alike: defaultdict[Hashable, list[tuple[int, Region]]] = defaultdict(list)
    for place, region in enumerate(regions):
        memory = region.memory
        layout = (memory.shape, memory.dtype, memory.device, region.offset, region.strides, region.row_length)
        alike[layout].append((place, region))
    places, sums = list[int](), list[Tensor]()
    for group in alike.values():
        for some in batched(group, _regions_at_once(group[0][1].memory)):
            region, bits = some[0][1], [_bits(each.memory) for _, each in some]
            memory = torch.stack(bits) if len(bits) > 1 else bits[0].unsqueeze(0)
            sums.append(_stacked_digests(memory, region.offset, region.strides, region.row_length))
            places += [place for place, _ in some]
    found = dict(zip(places, torch.cat(sums).tolist() if sums else (), strict=True))
    return [to_text(found[place]) for place in range(len(found))]


def _regions_at_once(memory: Tensor) -> int:
    """On a CPU, which launches nothing, one: the copy would be for nothing."""
    return 1 if memory.device.type == "cpu" else max(1, _PART_BYTES // max(1, memory.nbytes))


def _bits(memory: Tensor) -> Tensor:
    return memory.detach().view(_INTEGERS[memory.itemsize])


def _stacked_digests(memory: Tensor, offset: int, strides: tuple[int, ...], row_length: int) -> Tensor:
    """int64 [regions]: the shares of regions that lie alike in their tensors. ``memory``: integers [regions, ...]; the
    rest is as in :class:`Region`.

    Rows and blocks of whole words are read once, where they are. Everything else (a transposed view, columns that
    begin inside a word) is copied first, a part at a time.
    """
    total = torch.zeros(len(memory), dtype=torch.int64, device=memory.device)
    if memory.numel() == 0:
        return total
    memory, strides = _in_row_order(memory, strides)
    if offset % row_length == 0 and memory.shape[1] % row_length == 0 and strides == (1,):  # whole rows, flattened
        memory, strides = memory.unflatten(1, (-1, row_length)), (row_length, 1)
    at_once = max(1, _PART_BYTES // memory[:, :1].nbytes) if memory.ndim > 2 else memory.shape[1]
    for first in range(0, memory.shape[1], at_once):
        total += _part(memory[:, first : first + at_once], offset + first * strides[0], strides, row_length)
    return total


def _in_row_order(memory: Tensor, strides: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Reorder elements to the original tensors' layout; the last dimension runs along their rows."""
    kept = [dimension for dimension, length in enumerate(memory.shape[1:]) if length != 1]
    memory, strides = memory.reshape(len(memory), *(memory.shape[1 + d] for d in kept)), tuple(strides[d] for d in kept)
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    memory, strides = memory.permute(0, *(1 + d for d in order)), tuple(strides[d] for d in order)
    return (memory, strides) if strides and strides[-1] == 1 else (memory.unsqueeze(-1), (*strides, 1))


def _part(memory: Tensor, offset: int, strides: tuple[int, ...], row_length: int) -> Tensor:
    column = offset % row_length
    if column + memory.shape[-1] > row_length or any(stride % row_length for stride in strides[:-1]):
        memory, offset = _spread(memory, offset, strides, row_length)
        column, strides = 0, (row_length, 1)
    words, first_word = _as_words(memory, column)
    of_words = _on(words.device, word_multipliers, first_word, words.shape[-1])
    row, row_strides = offset // row_length, [stride // row_length for stride in strides[:-1]]
    regions, *outer, rows = words.shape[:-1] if words.ndim > 2 else (len(words), 1)
    *outer_strides, row_stride = row_strides or (1,)
    total = torch.zeros(regions, dtype=torch.int64, device=words.device)
    for index in itertools.product(*map(range, outer)):
        first = row + sum(i * stride for i, stride in zip(index, outer_strides, strict=True))
        of_rows = _on(words.device, row_multipliers, first, (rows - 1) * row_stride + 1)[::row_stride]
        total += block_digests(words[:, *index].reshape(regions, rows, -1), of_rows, of_words)
    return total


def _spread(memory: Tensor, offset: int, strides: tuple[int, ...], row_length: int) -> tuple[Tensor, int]:
    """``memory`` where it is in whole rows that are zero elsewhere, and the offset of the first one."""
    first = offset // row_length
    last = offset + sum((length - 1) * stride for length, stride in zip(memory.shape[1:], strides, strict=True))
    rows = memory.new_zeros(len(memory), last // row_length + 1 - first, row_length)
    rows.as_strided(memory.shape, (rows.stride(0), *strides), offset - first * row_length).copy_(memory)
    return rows, first * row_length


def _as_words(memory: Tensor, column: int) -> tuple[Tensor, int]:
    """int64 [..., words] of rows that begin at ``column``, with zeros around them where they end inside a word; and
    the place of the first word.
    """
    elements = WORD // memory.itemsize
    before = column % elements
    width = memory.shape[-1]
    aligned = [before, width, memory.storage_offset(), *memory.stride()[:-1]]
    if any(number % elements for number in aligned) or memory.stride(-1) != 1:
        padded = memory.new_zeros(*memory.shape[:-1], -(-(before + width) // elements) * elements)
        padded[..., before : before + width] = memory
        memory = padded
    return memory.view(torch.int64), column // elements


def block_digests(words: Tensor, of_rows: Tensor, of_words: Tensor) -> Tensor:
    """int64 [regions]: ``words_digest`` of each of ``words`` [regions, rows, words], on their device; on a CPU by it,
    which is faster than torch.
    """
    if words.device.type == "cpu":
        tables = of_rows.numpy(), of_words.numpy()
        sums = [words_digest(block, *tables) % MODULUS for block in words.numpy()]
        return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
    return torch_block_digests(words, of_rows, of_words)


def torch_block_digests(words: Tensor, of_rows: Tensor, of_words: Tensor) -> Tensor:
    """``words_digest`` of each block in torch."""
    mixed = words >> HALF
    mixed += words
    mixed *= of_words
    return (mixed.sum(-1) * of_rows).sum(-1)


def _on(device: torch.device, multipliers: Callable[[int, int], Words], first: int, count: int) -> Tensor:
    """[count] of ``multipliers``; on a GPU from a table that stays there."""
    if device.type == "cpu":
        return torch.from_numpy(multipliers(first, count))
    return _table(device, multipliers, 1 << (first + count - 1).bit_length())[first : first + count]


@lru_cache(maxsize=64)
def _table(device: torch.device, multipliers: Callable[[int, int], Words], count: int) -> Tensor:
    return torch.from_numpy(multipliers(0, count)).to(device)
