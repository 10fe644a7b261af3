"""Positions of tokens in packed sequences: which ones samples share (``--share-prefixes``), and which ones ranks hold.

Context parallelism splits sequences as Megatron does, in a zigzag. Every sequence is cut into 2 × size equal chunks, of
which a rank gets one from the front and its mirror image from the back, so that causal attention gives all ranks the
same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from miles_async.types import Int64


def positions_of_rank(boundaries: npt.ArrayLike, size: int, rank: int) -> Int64:
    """Return the positions that a rank holds, int64 [T / size], in its order.

    ``boundaries``: [S + 1], of sequences whose lengths are multiples of 2 × size; the last one is T.

    >>> positions_of_rank([0, 8, 12], size=2, rank=1).tolist()
    [2, 3, 4, 5, 9, 10]
    """
    bounds = np.asarray(boundaries, dtype=np.int64)
    held = np.diff(bounds) // size
    start, chunk = np.repeat(bounds[:-1], held), np.repeat(held // 2, held)
    offset = np.arange(len(start)) - start // size
    back = (2 * size - 2 - rank) * chunk  # the second chunk follows the first on this rank
    return start + offset + np.where(offset < chunk, rank * chunk, back)


def gathered_order(boundaries: npt.ArrayLike, size: int) -> Int64:
    """Return for each position, int64 [T], where it is in the concatenation of what all ranks hold.

    >>> gathered_order([0, 8], size=2).tolist()
    [0, 1, 4, 5, 6, 7, 2, 3]
    """
    return np.argsort(np.concatenate([positions_of_rank(boundaries, size, rank) for rank in range(size)]))


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """S samples of N tokens. The model reads M of them at T positions: not a sample's last token."""

    read: np.ndarray  # bool [N]
    samples: np.ndarray  # int64 [S + 1]: boundaries of the samples in [0, M]
    places: np.ndarray  # int64 [M]: position of each token that is read, in [0, T)
    own: np.ndarray  # int64 [S]: tokens at the end of each sample that share no position with an earlier one


def share_places(tokens: np.ndarray, offsets: np.ndarray) -> SharedPlaces:
    """Give tokens that follow equal tokens of their samples one position, as in a prefix tree.

    ``offsets``: [S + 1], of the samples in ``tokens``, [N]. Every sample has a position: one of a single token is
    read.

    >>> share_places(np.array([7, 8, 1, 0, 7, 8, 2, 0]), np.array([0, 4, 8])).places
    array([0, 1, 2, 0, 1, 3])
    """
    read = np.ones(len(tokens), dtype=bool)
    read[(offsets[1:] - 1)[np.diff(offsets) > 1]] = False
    samples = np.concatenate([[0], np.cumsum(read)])[offsets]
    tokens = tokens[read]
    places = np.empty(len(tokens), dtype=np.int64)
    own = np.zeros(len(offsets) - 1, dtype=np.int64)
    nodes: dict[tuple[int, int], int] = {}  # (position of the token before, token) → position
    for sample, (start, end) in enumerate(pairwise(samples.tolist())):
        used, place = len(nodes), -1
        for index, token in enumerate(tokens[start:end].tolist(), start):
            place = nodes.setdefault((place, token), len(nodes))
            places[index] = place
        own[sample] = len(nodes) - used
    return SharedPlaces(read, samples, places, own)
