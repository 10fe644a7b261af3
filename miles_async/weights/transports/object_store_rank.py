"""The sending rank's half of ``object_store``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miles_async.weights.delta import Bytes
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.host_files import Source


class ObjectStoreSender(Staging):
    """Implements PutsFiles."""

    def __init__(self, staging: StagingOptions, *, put: Callable[[Bytes], Source]) -> None:
        """``put``: array → reference to it (``ray.put``)."""
        super().__init__(staging)
        self._put = put

    def put_file(self, version: int, name: str) -> list[Source]:
        return [self._put(np.memmap(self.file(version, name), np.uint8, mode="r"))]
