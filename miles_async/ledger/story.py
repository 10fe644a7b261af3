"""An attempt's history in plain words, from its row in the ledger."""

from __future__ import annotations

from miles_async.ledger.reader import AttemptRecord
from miles_async.staleness.ledger import Outcome, Stage


def tell(record: AttemptRecord, *, started_at: float, came_again_as: int | None = None) -> str:
    """Describe an attempt's history in a few lines, the first without indent.

    Args:
        record: the row.
        started_at: seconds since 1970; times are relative to it.
        came_again_as: the prompt's next attempt, if it got one.
    """
    lines = [f"attempt {record.attempt_id} of prompt {record.prompt_id} (epoch {record.epoch}): {_headline(record)}"]
    lines.append(
        f"issued {record.issued_at - started_at:.1f} s into the run under version {record.issued_version}"
        + (f", after {counted(len(record.history), 'earlier attempt')}" if record.history else "")
    )
    lines += [f"  earlier: {why}" for why in record.history]
    lines += [*_generated(record), *_cut(record), *_ended(record)]
    if came_again_as is not None:
        lines.append(f"the prompt came again as attempt {came_again_as}")
    return "\n  ".join(lines)


def _headline(record: AttemptRecord) -> str:
    if record.outcome is Outcome.TRAINED and record.step is not None:
        return f"trained in step {record.step}"
    if record.outcome is not None:
        return WORDS[record.outcome]
    return {
        Stage.IN_FLIGHT: "being generated and rewarded",
        Stage.BUFFERED: "in the buffer, waiting for a cut",
        Stage.CUT: f"in the batch for version {record.target_version}, not trained yet",
    }[record.stage] + " when the ledger was last written"


WORDS = {
    Outcome.TRAINED: "trained",
    Outcome.FILTERED: "filtered out",
    Outcome.STALE_RECYCLED: "too old, recycled",
    Outcome.STALE_DROPPED: "too old, dropped",
    Outcome.FAILED: "failed",
    Outcome.QUARANTINED: "failed, and the prompt is quarantined: it gets no more attempts",
    Outcome.CANCELLED: "cancelled, since the run ended",
}


def _generated(record: AttemptRecord) -> list[str]:
    if record.finished_at is None or record.response_lengths is None:
        return []
    samples = len(record.response_lengths)
    shortest, longest = min(record.response_lengths), max(record.response_lengths)
    engines = f" by {', '.join(record.engines)}" if record.engines else ""
    line = (
        f"generated{engines} in {record.finished_at - record.issued_at:.1f} s: {counted(samples, 'sample')} of "
        f"{_tokens(shortest, longest)} with {_versions(record)}"
    )
    if record.mixed_samples:
        line += f", {record.mixed_samples} of them across versions"
    lines = [line]
    if record.chunks is not None and record.chunks > samples:
        lines.append(f"publications interrupted it: {record.chunks} generation calls for {counted(samples, 'sample')}")
    if record.left_out:
        lines.append(f"{counted(record.left_out, 'further sample')} of it had become too old and left")
    if record.reward_mean is not None:
        lines.append(f"reward {record.reward_mean:.4g} (mean)")
    return lines


def _cut(record: AttemptRecord) -> list[str]:
    if record.cut_at is None or record.finished_at is None:
        return []
    return [f"waited {record.cut_at - record.finished_at:.1f} s, cut for version {record.target_version}{_age(record)}"]


def _ended(record: AttemptRecord) -> list[str]:
    if record.outcome is None or record.ended_at is None:
        return []
    if record.outcome is Outcome.TRAINED:
        step = "trained" if record.step is None else f"trained in step {record.step}"
        return [f"{step}, {record.ended_at - record.issued_at:.1f} s after it was issued"]
    reason = f": {record.reason}" if record.reason else ""
    if record.outcome in (Outcome.STALE_RECYCLED, Outcome.STALE_DROPPED):
        action = "recycled" if record.outcome is Outcome.STALE_RECYCLED else "dropped"
        if record.stage is Stage.IN_FLIGHT:
            return [f"{action}{reason} while it was generated, too old for version {record.target_version}"]
        return [f"{action}{reason} at the cut for version {record.target_version}"]
    return [f"{record.outcome} after {record.ended_at - record.issued_at:.1f} s{reason}"]


def _age(record: AttemptRecord) -> str:
    if record.target_version is None or record.oldest_version is None:
        return ""
    return f" (age {record.target_version - record.oldest_version})"


def _versions(record: AttemptRecord) -> str:
    if record.oldest_version == record.newest_version:
        return f"version {record.oldest_version}"
    return f"versions {record.oldest_version}–{record.newest_version}"


def _tokens(low: int, high: int) -> str:
    return counted(low, "token") if low == high else f"{low}–{high} tokens"


def counted(number: int, noun: str) -> str:
    """``1, "group"`` → ``"1 group"``, ``2, "group"`` → ``"2 groups"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
