"""Check that each row can be rewarded, before anything is generated."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from miles_async.arguments.rewards import COMPARING_REWARDS, RewardArguments, parse_rm_type
from miles_async.errors import ConfigurationError, DataError, RewardError
from miles_async.rewards.code_tests import CONFINED, read_tests, sandbox_level
from miles_async.rewards.multiple_choice import read_letter
from miles_async.runtime.packages import require
from miles_async.types import JsonObject, Label


class Rewarded(Protocol):
    """The part of a row that rewards see."""

    @property
    def label(self) -> Label | None: ...

    @property
    def metadata(self) -> JsonObject: ...


class RewardOfRow:
    """Finds rows that ``--rm-type``, or their own ``rm_type``, could not reward.

    A reward's needs of the machine are checked when the first row names it.
    """

    def __init__(self, arguments: RewardArguments, overrides: JsonObject | None = None) -> None:
        """``overrides``: added to the metadata of every row; these win."""
        self._arguments = arguments
        self._overrides = overrides or {}
        self._needs_checked: set[str] = set()

    @property
    def names(self) -> Set[str]:
        """Rewards that rows had so far, by their own names or by --rm-type."""
        return self._needs_checked

    def __call__(self, row: Rewarded, location: str) -> None:
        """Check one row. Raises DataError that begins with ``location`` ("train.jsonl:7")."""
        metadata = {**row.metadata, **self._overrides}
        own = metadata.get("rm_type")
        try:
            for name, _ in parse_rm_type(str(own if own is not None else self._arguments.rm_type or "")):
                self._check_needs(name)
                _check_row(name, row.label, metadata)
        except (ConfigurationError, RewardError) as error:
            place = "metadata_overrides" if "rm_type" in self._overrides else "--metadata-key"
            named = "its reward (--rm-type)" if own is None else f"its own reward (rm_type {own!r} in {place})"
            raise DataError(f"{location}: {named}: {error}") from error

    def _check_needs(self, name: str) -> None:
        if name in self._needs_checked:
            return
        self._needs_checked.add(name)
        if name in CONFINED:
            sandbox_level(self._arguments.reward_sandbox)
        match name:
            case "reasoning_gym":
                require("reasoning-gym", "--rm-type reasoning_gym")
            case "remote_rm" if self._arguments.rm_url is None:
                raise ConfigurationError("remote_rm needs --rm-url")
            case "judge" if self._arguments.judge_url is None:
                raise ConfigurationError("judge needs --judge-url")


def _check_row(name: str, label: Label | None, metadata: JsonObject) -> None:
    if name in COMPARING_REWARDS and label is None:
        raise RewardError(f"{name} compares with a label, and the row has none (--label-key)")
    accepted = (label,) if isinstance(label, str) else label or ()
    match name:
        case "math" if not all(answer.strip("$ \t\n") for answer in accepted):
            raise RewardError("math compares with an answer, and the label is empty (--label-key)")
        case "multiple_choice":
            for letter in accepted:
                read_letter(letter)
        case "code":
            read_tests(label, metadata)
        case "reasoning_gym" if not isinstance(metadata.get("source_dataset"), str):
            raise RewardError("its metadata names no task (source_dataset)")
        case "reasoning_gym" if isinstance(label, tuple):
            raise RewardError(f"its task compares with one answer, the label has {len(label)} (--label-key)")
