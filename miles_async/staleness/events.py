"""Events of the pool: one record per change in the life of an attempt.

The ledger on disk, the schedule and the simulation all consume these records (``Pool(observers=...)``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.types import Attempt, Changes, Group


class Restored(msgspec.Struct, frozen=True):
    """The pool continues from a checkpoint. Its live attempts follow, as if they were issued and finished now.

    The ledger on disk stores this record as JSON.
    """

    balance: Balance  # of the attempts of earlier processes, whose rows are in their run directories
    quarantined: tuple[DeadLetter, ...] = ()
    accepted: tuple[str, ...] = ()  # changes of model and prompts since the checkpoint, accepted by --load-anyway


class Issued(msgspec.Struct, frozen=True):
    """The attempt was admitted."""

    attempt: Attempt


class Finished(msgspec.Struct, frozen=True):
    """The group was generated and rewarded. It is in the buffer, or about to end as filtered."""

    group: Group


class Trimmed(msgspec.Struct, frozen=True):
    """A cut removed samples that were too old from a group, which stays in the buffer (C7)."""

    group: Group  # the rest
    left_out: int  # samples removed


class Cut(msgspec.Struct, frozen=True):
    """A batch left the buffer."""

    attempt_ids: tuple[int, ...]  # in batch order
    target_version: int  # the version that the optimizer will step from


class Ended(msgspec.Struct, frozen=True):
    """The attempt ended."""

    attempt_id: int
    outcome: Outcome
    reason: str = ""
    target_version: int | None = None  # the version that it was too old for
    step: int | None = None  # the step that trained it


class Checked(msgspec.Struct, frozen=True):
    """The pool has just checked C2."""

    issued: int  # attempts in all
    live: Mapping[int, Stage]  # live attempts


class Changed(msgspec.Struct, frozen=True):
    """The run continues with changed settings."""

    changes: Changes


class EpochBegan(msgspec.Struct, frozen=True):
    """A new epoch began. Sent by the prompt source to the ledger only."""

    data: str  # file, or all of them
    epoch: int
    sampler: str  # --prompt-sampler
    prompts: int  # rows that the epoch gives
    left_out: int  # rows that it does not


class PromptsOpened(msgspec.Struct, frozen=True):
    """The prompt data of a run. Sent by the prompt source to the ledger only."""

    files: Mapping[str, str]  # beginning of the prompts' ids → digest of the content
    earlier_rates: int  # prompts whose pass rate is known from --pass-rates


PoolEvent = Restored | Issued | Finished | Trimmed | Cut | Ended | Checked | Changed | EpochBegan | PromptsOpened

PoolObserver = Callable[[PoolEvent], None]
"""Receives every event on the pool's thread, after the change. It must not wait or raise."""
