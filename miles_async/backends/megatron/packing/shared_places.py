"""Positions of tokens in a packed sequence whose samples share prefixes. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """S samples of N tokens, of which the model reads M at T positions: nothing follows from a sample's last token."""

    read: np.ndarray  # bool [N]
    samples: np.ndarray  # int64 [S + 1]: boundaries of the samples in [0, M]
    places: np.ndarray  # int64 [M]: position of each token that is read, in [0, T)
    own: np.ndarray  # int64 [S]: tokens at the end of each sample that no earlier one has at their positions


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
