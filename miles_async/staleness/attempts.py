"""The attempt book: issues attempts and decides what follows one that ended untrained (C5, C6).

That is another attempt, a fresh prompt, or quarantine of the prompt. Every such end is followed by exactly one new
attempt, so the pool keeps its size (C3): :meth:`AttemptBook.issue` fills the slot, with waiting retries first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from miles_async.errors import DataError
from miles_async.staleness.ledger import Outcome
from miles_async.types import UNISSUED, Attempt, Prompt


class Cause(enum.StrEnum):
    """Why an attempt ended untrained."""

    STALE = "stale"  # too old at the cut
    FILTERED = "filtered"  # nothing to learn from it now; not its fault
    INFRASTRUCTURE = "infrastructure"  # engines or network, past what one sample survives
    DATA = "data"  # its own fault: rejected, no reward, no usable output


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Limits on retries. Each cause has its own counter, so a broken network never spends the budget of bad data."""

    max_prompt_attempts: int  # ends of one cause after which a prompt gets no more attempts in this epoch
    max_quarantined_prompts: int  # quarantined prompts after which the run stops
    recycle_stale: bool  # another attempt for a stale group's prompt (recycle), or a fresh prompt (drop)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A quarantined prompt and the reason of each of its attempts."""

    prompt_id: str
    epoch: int
    reasons: tuple[str, ...]  # one per ended attempt, in order


class BookState(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt book at one moment, for a checkpoint."""

    next_id: int
    retries: tuple[Attempt, ...]  # in the order in which they are issued
    quarantined: tuple[Attempt, ...]
    readmissions: tuple[str, ...]  # ids of the requests that were granted


class AttemptBook:
    """Issues attempts: numbers them, retries first, never a quarantined prompt."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._next_id = 0
        self._retries: deque[Attempt] = deque()
        self._quarantined: dict[str, Attempt] = {}  # prompt_id → attempt to readmit
        self._readmissions: set[str] = set()  # requests that were granted

    @property
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Prompts that get no more attempts, with the reasons."""
        return tuple(dead_letter(retry) for retry in self._quarantined.values())

    @property
    def waiting_retries(self) -> int:
        """Prompts that wait for another attempt."""
        return len(self._retries)

    def admits(self, prompt: Prompt) -> bool:
        """Return whether a prompt from the source may be tried: it is not quarantined. Another prompt with the id of a
        quarantined one, as after a change of the data, ends that quarantine.
        """
        last = self._quarantined.get(prompt.prompt_id)
        if last is None or _content(last.prompt) == _content(prompt):
            return last is None
        del self._quarantined[prompt.prompt_id]
        return True

    def issue(self, fresh: Callable[[], tuple[int, Prompt]], issued_version: int) -> Attempt:
        """Return the next attempt; ``fresh`` gives the next (epoch, prompt) that is not quarantined."""
        attempt_id, self._next_id = self._next_id, self._next_id + 1
        if self._retries:
            waiting = self._retries.popleft()
        else:
            epoch, prompt = fresh()
            waiting = Attempt(prompt=prompt, epoch=epoch)
        return replace(waiting, attempt_id=attempt_id, issued_version=issued_version)

    def ended(self, attempt: Attempt, cause: Cause, reason: str) -> Outcome:
        """Decide what follows an attempt that ended untrained; queue the retry, if there is one. If this quarantines
        the prompt, its letter is the last of :attr:`dead_letters`.

        Filtered: a fresh prompt; the same weights would likely give the same rewards again, and an easy
        prompt is not a bad prompt. Stale: another attempt by ``--stale-group-action recycle``, up to
        ``--max-prompt-attempts`` times, then, and by ``drop``, a fresh prompt; never quarantine, since being
        slow is not the fault of the prompt, and it should return in the next epoch. Failed: another attempt, up to
        ``--max-prompt-attempts`` times; then quarantine if the data is at fault, and a fresh prompt if the
        infrastructure is, which says nothing about the prompt.

        Raises:
            DataError: more prompts are quarantined than ``--max-quarantined-prompts`` allows.
        """
        if cause is Cause.FILTERED:
            return Outcome.FILTERED
        if attempt.prompt.prompt_id in self._quarantined:  # after another attempt, in another epoch
            return Outcome.STALE_DROPPED if cause is Cause.STALE else Outcome.FAILED
        last_stale = attempt.stale_count + 1 >= self._policy.max_prompt_attempts
        if cause is Cause.STALE and (last_stale or not self._policy.recycle_stale):
            return Outcome.STALE_DROPPED
        retry = replace(
            unissued(attempt),
            data_failures=attempt.data_failures + (cause is Cause.DATA),
            infra_failures=attempt.infra_failures + (cause is Cause.INFRASTRUCTURE),
            stale_count=attempt.stale_count + (cause is Cause.STALE),
            history=(*attempt.history, f"{cause}: {reason}"),
        )
        if retry.data_failures >= self._policy.max_prompt_attempts:
            return self._quarantine(retry)
        if retry.infra_failures >= self._policy.max_prompt_attempts:
            return Outcome.FAILED
        self._retries.append(retry)
        return Outcome.STALE_RECYCLED if cause is Cause.STALE else Outcome.FAILED

    def readmit(self, request_id: str, prompt_ids: Iterable[str]) -> tuple[str, ...]:
        """Give quarantined prompts their whole budget again, and an attempt before fresh prompts get one.

        A request is granted once, however often the file that holds it is read: a prompt that fails again is
        quarantined again. Returns the prompts that were quarantined until now.
        """
        if request_id in self._readmissions:
            return ()
        self._readmissions.add(request_id)
        readmitted = [self._quarantined.pop(prompt_id) for prompt_id in prompt_ids if prompt_id in self._quarantined]
        for retry in readmitted:
            history = (*retry.history, "readmitted")
            self._retries.append(Attempt(prompt=retry.prompt, epoch=retry.epoch, history=history))
        return tuple(retry.prompt.prompt_id for retry in readmitted)

    def state(self) -> BookState:
        return BookState(
            next_id=self._next_id,
            retries=tuple(self._retries),
            quarantined=tuple(self._quarantined.values()),
            readmissions=tuple(sorted(self._readmissions)),
        )

    def restore(self, state: BookState) -> None:
        """Continue from a saved state; ids are not reused."""
        self._next_id = state.next_id
        self._retries = deque(state.retries)
        self._quarantined = {retry.prompt.prompt_id: retry for retry in state.quarantined}
        self._readmissions = set(state.readmissions)

    def _quarantine(self, last: Attempt) -> Outcome:
        self._quarantined[last.prompt.prompt_id] = last
        # Overlapping epochs: another attempt of the same prompt may be waiting for its next try.
        self._retries = deque(retry for retry in self._retries if retry.prompt.prompt_id not in self._quarantined)
        if len(self._quarantined) > self._policy.max_quarantined_prompts:
            raise DataError(
                f"expected at most --max-quarantined-prompts {self._policy.max_quarantined_prompts}, found "
                f"{len(self._quarantined)}; the last is {last.prompt.prompt_id!r}: {'; '.join(last.history)}"
            )
        return Outcome.QUARANTINED

    def only_quarantined(self) -> DataError:
        """The error for a source of quarantined prompts only, with the reasons of the last one."""
        *_, last = self._quarantined.values()
        return DataError(
            f"expected a prompt that is not quarantined, found only the {len(self._quarantined)} that are; the last is "
            f"{last.prompt.prompt_id!r}: {'; '.join(last.history)}"
        )


def unissued(attempt: Attempt) -> Attempt:
    """Another try of an attempt, which waits to be issued: with its counters and nothing else of it (M7)."""
    return replace(attempt, attempt_id=UNISSUED, issued_version=0)


def _content(prompt: Prompt) -> tuple[object, ...]:
    """The parts of a prompt to compare with another of its id. User code may have changed metadata and messages."""
    return prompt.token_ids, prompt.label, prompt.pictures


def dead_letter(last: Attempt) -> DeadLetter:
    """Dead letter of a quarantined prompt."""
    return DeadLetter(prompt_id=last.prompt.prompt_id, epoch=last.epoch, reasons=last.history)
