"""Recent activity of engines and trainer ranks: small files in the run directory, for its page."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from miles_async.types.fleet import EngineLoad


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Times are in seconds since 1970."""

    state: str
    load: EngineLoad | None  # when it was last asked, which paused ones are not
    pauses: tuple[tuple[float, float | None], ...]  # the last ones: from, until; None: it is paused
    role: str = "train"  # of its group: or evaluation, frozen


class EnginesReport(msgspec.Struct, frozen=True, kw_only=True):
    """All engines at one moment."""

    time: float
    engines: Mapping[str, EngineReport]  # by id


class RankTimes(msgspec.Struct, frozen=True, array_like=True):
    """A rank's rollout step."""

    began: float  # seconds since 1970
    seconds: Mapping[str, float]  # by part, in order; summed where parts alternate


class RanksReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last rollout steps: the times of all ranks, in their order."""

    steps: tuple[tuple[RankTimes, ...], ...]
