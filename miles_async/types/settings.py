"""Settings that were changed while the run was live (``miles-async set``)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

SettingValue = int | float | str | None


class KeptSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in a checkpoint that differs from its flag."""

    flag: SettingValue  # as the user gave it
    value: SettingValue


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that took effect together, between two cuts.

    The batch of step ``after`` was cut with the values ``before``, and all later ones are cut and trained with
    ``values``. Names are fields of flags, with their values in force, and requests such as ``evaluation``.
    """

    after: int  # rollout step
    before: Mapping[str, SettingValue]  # None for requests
    values: Mapping[str, SettingValue]

    def bound(self, before: int | None) -> int | None:
        """The bound on age from now on, if it was ``before``."""
        return self._whole("max_weight_staleness", before)

    def lead(self, before: int) -> int:
        """The lead in batches from now on, if it was ``before``."""
        return self._whole("max_rollout_lead", before) or before

    def concurrency(self, before: int) -> int:
        """Samples in flight per engine from now on, if they were ``before``."""
        return self._whole("rollout_concurrency_per_engine", before) or before

    def _whole(self, name: str, before: int | None) -> int | None:
        value = self.values.get(name, before)
        assert value is None or isinstance(value, int), f"{name}: {value!r}"
        return value
