"""Positions of tokens in a packed sequence in which samples share their prompts. Light to import."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def shared_places(tokens: np.ndarray, offsets: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Position of each token, int64 [N]. Samples with equal tokens before their first needed one share these positions.

    ``offsets``: [S + 1], of the samples in ``tokens``, [N]. ``needed``: bool [N].

    >>> shared_places(np.array([7, 8, 1, 7, 8, 2]), np.array([0, 3, 6]), np.array([0, 0, 1, 0, 0, 1], dtype=bool))
    array([0, 1, 2, 0, 1, 3])
    """
    places = np.empty(len(tokens), dtype=np.int64)
    prompts: dict[bytes, int] = {}  # tokens → their first position
    used = 0
    for start, end in pairwise(offsets.tolist()):
        carrying = np.flatnonzero(needed[start:end])
        response = start + int(carrying[0]) if len(carrying) else end
        prompt = tokens[start:response].tobytes()
        if prompt not in prompts:
            prompts[prompt] = used
            used += response - start
        places[start:response] = np.arange(response - start) + prompts[prompt]
        places[response:end] = np.arange(end - response) + used
        used += end - response
    return places


def first_uses(places: np.ndarray) -> np.ndarray:
    """True for the first token of each position, bool [N]."""
    first = np.zeros(len(places), dtype=bool)
    first[np.unique(places, return_index=True)[1]] = True
    return first
