"""Options of staging: plain data, which the driver can name without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.weights import DeltaEncoding, Quantization

KEPT_VERSIONS = 2  # the newest one may be staged while engines that come up still get the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingOptions:
    """Options of one sender's ``Staging``."""

    parent: Path | None = None  # parent of the sender's directory; None: in memory if it has ``room``, else on disk
    shared: bool = False  # other users may read the files; else this one only
    version_bytes: int | None = None  # of this sender's share of a version; None: unknown
    bucket_bytes: int
    sender: int = 0  # index among ``senders``, each of which stages a share
    senders: int = 1
    keep: int = KEPT_VERSIONS  # how many of the newest versions stay; at least 2
    pinned: int = 1  # most older ones that are in use: by a repair, and by an evaluation on engines of its own
    digests: bool = True
    quantization: Quantization = "none"
    delta: DeltaEncoding | None = None  # also write what changed since the version before

    @property
    def versions(self) -> int:
        """Most versions at a time: the kept ones, of which the newest may be in writing, and the pinned ones."""
        return self.keep + self.pinned

    @property
    def room(self) -> int | None:
        """Bytes of all files; None if unknown. A delta may be as large as what it describes."""
        files = 1 if self.delta is None else 2
        return None if self.version_bytes is None else files * self.versions * self.version_bytes

    @property
    def room_in_memory(self) -> int | None:
        """Bytes of all files and of the copy that they are written from."""
        return None if self.room is None or self.version_bytes is None else self.room + self.version_bytes
