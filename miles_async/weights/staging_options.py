"""Options of staging: plain data, which the driver can name without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.weights import DeltaEncoding

KEPT_VERSIONS = 2  # the newest one may be staged while engines that come up still get the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingOptions:
    """Options of one sender's ``Staging``."""

    parent: Path  # the sending process makes a directory for its files in it
    bucket_bytes: int
    sender: int = 0  # index among ``senders``, each of which stages a share
    senders: int = 1
    keep: int = KEPT_VERSIONS  # how many of the newest versions stay
    digests: bool = True
    delta: DeltaEncoding | None = None  # also write what changed since the version before
