"""Weight versions per token, from an engine's raw report (C1).

An engine reports ``meta_info.weight_versions`` (spans) and ``meta_info.weight_version`` (one label, of the
end of the response, hence too fresh for the tokens before it). Neither is taken as is: the rule everywhere
is that the result may be *older* than the truth and never fresher.

That rests on two facts: weights only get newer during one generation call, and a serving engine is never
older than the version that was visible when the call was dispatched (C8: publication is all-or-nothing).

For samples in flight, :class:`OldestVersions` keeps the certain facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from miles_async.errors import VersionUnknownError
from miles_async.types import Attempt, Group, Int32, Sample, columns_of

ONE_STEP = 1
"""Tokens in flight at an engine without speculative decoding: the error of each reported start or end.

SGLang counts a request's tokens when weights change, and with its overlap schedule the results of one forward pass are
not counted then: the pass was launched with the old weights, and its results wait in a queue that never holds more
than one (``event_loop_overlap`` of sglang 0.5.23, managers/scheduler.py; without overlap it holds none). ``retract``
and ``abort`` empty the queue before weights change, ``in_place`` does not. A pass yields one token per request, or with
speculative decoding as many as it verifies: ``--speculative-num-draft-tokens``.
"""

MAX_VERSION = int(np.iinfo(np.int32).max)  # versions travel as int32 arrays


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) of one generation call came from weight version ``version``."""

    version: int
    start: int
    end: int


def token_versions(
    reported_spans: object, reported_label: object, num_tokens: int, dispatch_version: int, tokens_in_flight: int
) -> Int32:
    """Return int32 [num_tokens], the version of each token as :func:`parse_spans` decides it."""
    spans = parse_spans(reported_spans, reported_label, num_tokens, dispatch_version, tokens_in_flight)
    return versions_per_token(spans, num_tokens)


def parse_spans(
    reported_spans: object,
    reported_scalar: object,
    num_tokens: int,
    dispatch_version: int,
    tokens_in_flight: int = ONE_STEP,
) -> tuple[VersionSpan, ...]:
    """Spans that cover [0, num_tokens) and are nowhere fresher than the truth.

    1. No tokens: ``()``.
    2. Reported spans are believed if they start at 0, follow each other and reach the end, each within
       ``tokens_in_flight`` tokens, and get newer. A span without a usable version is an error: its tokens came
       from unknown weights.
    3. At an edge the earlier version is the truth: the first ``tokens_in_flight`` tokens of every later span go to
       the earlier one. The start of the call is an edge too, if the first span is newer than ``dispatch_version``: a
       prefill in flight when weights change in place is reported under the new version from token 0 on.
    4. A cover that ends that many tokens short is extended (a later token is at least as fresh as the one before
       it); one that ends late is clipped.
    5. Otherwise one span of the oldest version in sight: at dispatch, the label, any span.

    Args:
        reported_spans: sequence of mappings ``{version, start, end}`` (version an int or digits), or None.
        reported_scalar: the label of the response, an int or digits; "default" means never updated.
        num_tokens: output tokens of the call.
        dispatch_version: visible when the call was sent.
        tokens_in_flight: that one forward pass of the engine may yield for a request.

    Raises:
        VersionUnknownError: nothing usable was reported: absent, "default", negative, malformed, too large.

    >>> reported = [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 6}]
    >>> parse_spans(reported, "4", num_tokens=6, dispatch_version=3)
    (VersionSpan(version=3, start=0, end=5), VersionSpan(version=4, start=5, end=6))
    """
    if num_tokens == 0:
        return ()
    dispatched = _parse_version(dispatch_version, "dispatch")
    reported = _read_spans(reported_spans)
    versions = [span.version for span in reported]
    if reported and _is_believable(reported, num_tokens, tokens_in_flight):
        return _assign_edges(reported, num_tokens, dispatched, tokens_in_flight)
    if reported_scalar is not None or not versions:
        versions.append(_parse_version(reported_scalar, "weight_version"))
    return (VersionSpan(min(dispatched, *versions), 0, num_tokens),)


def _parse_version(raw: object, source: str) -> int:
    version = -1
    if isinstance(raw, int) and not isinstance(raw, bool):
        version = int(raw)
    elif isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) <= len(str(MAX_VERSION)):
        version = int(raw)
    if not 0 <= version <= MAX_VERSION:
        raise VersionUnknownError(
            f"expected a version from 0 to {MAX_VERSION} as {source}, found {raw!r}; an engine that "
            f'says "default" or nothing was not given a version by a publication'
        )
    return version


def _read_spans(raw: object) -> list[VersionSpan]:
    """The reported spans, positions unchecked; [] if there are none or they are not spans at all."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        return []
    spans = []
    for entry in raw:
        if not isinstance(entry, Mapping):
            raise VersionUnknownError(f"expected weight_versions entries {{version, start, end}}, found {entry!r}")
        version = _parse_version(entry.get("version"), "weight_versions")
        start, end = entry.get("start"), entry.get("end")
        if isinstance(start, int) and isinstance(end, int):
            spans.append(VersionSpan(version, start, end))
        else:  # still names a version that took part, but makes the positions of all unbelievable
            spans.append(VersionSpan(version, -1, -1))
    return spans


def _is_believable(spans: Sequence[VersionSpan], num_tokens: int, tolerance: int) -> bool:
    return (
        spans[0].start == 0
        and abs(spans[-1].end - num_tokens) <= tolerance
        and all(span.start <= span.end for span in spans)
        and all(
            abs(after.start - before.end) <= tolerance and before.version <= after.version
            for before, after in pairwise(spans)
        )
    )


def _assign_edges(
    spans: Sequence[VersionSpan], num_tokens: int, dispatched: int, tolerance: int
) -> tuple[VersionSpan, ...]:
    """Shift every edge later by the tolerance, drop what becomes empty, merge equal neighbours.

    Where one span's end and the next one's start disagree, the later of both is the edge.
    """
    versions = [min(spans[0].version, dispatched), *(span.version for span in spans)]
    stops = [tolerance if spans[0].version > dispatched else 0]
    stops += [max(before.end, after.start) + tolerance for before, after in pairwise(spans)]
    result: list[VersionSpan] = []
    for version, stop in zip(versions, [*stops, num_tokens], strict=True):
        start = result[-1].end if result else 0
        stop = min(stop, num_tokens)
        if stop <= start:
            continue
        if result and result[-1].version == version:
            result[-1] = VersionSpan(version, result[-1].start, stop)
        else:
            result.append(VersionSpan(version, start, stop))
    return tuple(result)


def versions_per_token(spans: Sequence[VersionSpan], num_tokens: int) -> Int32:
    """Return int32 [num_tokens]; ``spans`` cover [0, num_tokens) without gaps, as from :func:`parse_spans`."""
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1], spans
    assert edges[-1] == num_tokens, (spans, num_tokens)
    versions = np.array([span.version for span in spans], dtype=np.int32)
    return np.repeat(versions, [span.end - span.start for span in spans])


def loss_versions(sample: Sample) -> Int32:
    """Return int32 [L]: versions of the tokens that carry loss, over all branches. Prompt and tool output don't count.

    Raises VersionUnknownError as ``Branch.loss_versions`` does, for one of them.
    """
    of_branches = [branch.loss_versions() for branch in sample.branches]
    return of_branches[0] if len(of_branches) == 1 else np.concatenate(of_branches)


def oldest_version(sample: Sample) -> int:
    """Return the version that decides the age of a sample. Raises VersionUnknownError as :func:`loss_versions` does."""
    return int(loss_versions(sample).min())


def is_mixed(sample: Sample) -> bool:
    """Return whether tokens that carry loss came from several versions."""
    versions = loss_versions(sample)
    return bool(versions.min() != versions.max())


def group_of(attempt: Attempt, samples: Sequence[Sample], *, stopped: int = 0, aborted: int = 0) -> Group:
    """Make the group of an attempt's finished samples; it is as old as the oldest of them (M5).

    Raises:
        VersionUnknownError: a sample has no usable version.
    """
    assert samples, f"attempt {attempt.attempt_id}: a group is never empty"
    columns = columns_of(samples)
    *_, oldest, newest, _ = columns.T
    group = Group(
        attempt=attempt,
        samples=tuple(samples),
        oldest_version=int(oldest.min()),
        newest_version=int(newest.max()),
        stopped=stopped,
        aborted=aborted,
    )
    vars(group)["columns"] = columns  # where ``Group.columns`` keeps them
    return group


class OldestVersions:
    """Upper bounds on the oldest version of samples in flight, by routing key (one per sample).

    The oldest version of a sample's loss tokens is known only when the sample is finished. But any version that one of
    them has for certain is a bound. Two things are certain. Tokens that were kept have their labels (:meth:`note`). And
    the first token of an answer is never labelled newer than the version its request was dispatched under
    (:func:`parse_spans`), so a request gives its sample's bound from its dispatch on, if its answer is the beginning of
    the sample (``dispatched``).
    """

    def __init__(self, dispatched: Callable[[str], int | None] = lambda key: None) -> None:
        """``dispatched``: routing key → version under which its request in flight was dispatched. Pass it only if the
        first token of every answer carries loss, as in single-turn generation.
        """
        self._dispatched = dispatched
        self._versions: dict[str, int | None] = {}  # of watched samples

    def watch(self, key: str) -> None:
        """Begin to watch a sample, or watch it from the start again: nothing is known about it."""
        self._versions[key] = None

    def forget(self, key: str) -> None:
        """Stop watching a sample that failed or whose group ended. No-op for one that is not watched."""
        self._versions.pop(key, None)

    def note(self, key: str, version: int) -> None:
        """Note a kept token of ``version`` that carries loss. No-op for a sample that is not watched (evaluation)."""
        if key in self._versions:
            known = self._versions[key]
            self._versions[key] = version if known is None else min(known, version)

    def oldest(self, key: str) -> int | None:
        """Return the bound of a sample; None if it may still be of any version."""
        if key not in self._versions:
            return None
        known = self._versions[key]
        return self._dispatched(key) if known is None else known
