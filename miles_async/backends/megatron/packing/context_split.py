"""How context parallelism splits packed sequences over ranks: Megatron's zigzag.

Every sequence is cut into 2 × size equal chunks, of which a rank gets one from the front and its mirror image from the
back, so that causal attention gives all ranks the same work.
"""

from __future__ import annotations

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
