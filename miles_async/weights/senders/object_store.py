"""Staged files into an object store that the engines' hosts read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miles_async.weights.staging import Staging, StagingOptions


class ObjectStoreSender(Staging):
    """Implements WeightSender."""

    def __init__(self, staging: StagingOptions, *, put: Callable[[Any], Any]) -> None:
        """``put``: array → reference to it (``ray.put``)."""
        super().__init__(staging)
        self._put = put

    def put_file(self, version: int, name: str) -> list[Any]:
        """A reference, in a list so that nobody on its way fetches the bytes; they stay as long as somebody has it."""
        return [self._put(np.memmap(self.file(version, name), np.uint8, mode="r"))]
