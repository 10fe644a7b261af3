"""Protocol of the order of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from miles_async.types import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRows:
    """Rows of one epoch, with the facts known when it began."""

    epoch: int  # from 0
    rows: range  # indices: of all files, or with --prompt-data-weights of one
    pass_rates: Mapping[int, float]  # row → share of the last group's samples that solved it; only rows that were tried
    random: np.random.Generator  # seeded by --rollout-seed and the epoch
    metadata: Callable[[int], JsonObject]  # of a row (--metadata-key); reads the file


@runtime_checkable
class PromptSampler(Protocol):
    """``--prompt-sampler module:attr``: indices of rows, in the order in which an epoch gives them.

    It must depend on its argument alone: a run that resumes asks it for the same epoch again. What it leaves out does
    not come in this epoch; what it names twice comes twice.

    >>> def easy_first(rows):
    ...     return sorted(rows.rows, key=lambda row: rows.metadata(row)["level"])
    """

    def __call__(self, rows: EpochRows) -> Iterable[int]: ...
