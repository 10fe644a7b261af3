"""Where the groups of a run stand, by its ledger on disk: what its heartbeat and ``miles-async status`` say."""

from __future__ import annotations

from pathlib import Path

from miles_async.errors import LedgerError
from miles_async.ledger.reader import open_ledger
from miles_async.staleness.ledger import Balance, Outcome

LONGEST_REASON = 80  # characters; errors of engines can be pages


def read_balance(ledger: Path) -> Balance | None:
    """The balance as of the ledger's last flush; None if there is no ledger yet, or none that can be read."""
    if not ledger.is_file():
        return None
    try:
        with open_ledger(ledger) as reader:
            return reader.balance()
    except LedgerError:
        return None


def standing_line(balance: Balance) -> str:
    """Groups in flight, buffered, and filtered or failed with the commonest reason; then what the run waits for."""
    parts = [f"{balance.in_flight} groups in flight", f"{balance.buffered} buffered"]
    finished = sum(balance.ended.values()) + balance.buffered + balance.cut
    for outcome in (Outcome.FILTERED, Outcome.FAILED):
        if count := balance.ended.get(outcome, 0):
            reason = commonest_reason(balance, outcome)
            parts.append(f"{count} of {finished} finished ones {outcome}" + (f" (mostly: {reason})" if reason else ""))
    return f"{', '.join(parts)}; {waits_for(balance)}"


def waits_for(balance: Balance) -> str:
    """What the next step waits for, as far as the groups tell."""
    if balance.cut:
        return f"{balance.cut} groups are with the trainer"
    if balance.in_flight:
        return "the trainer waits for groups in flight"
    if balance.issued:
        return "nothing is in flight: rollouts wait for the trainer or for engines"
    return "rollouts wait for the first weights"


def commonest_reason(balance: Balance, outcome: Outcome) -> str:
    """The most frequent reason of that outcome, shortened; empty if none was given."""
    start = f"{outcome}: "
    counts = {text.removeprefix(start): count for text, count in balance.reasons.items() if text.startswith(start)}
    if not counts:
        return ""
    reason = " ".join(max(counts, key=lambda text: counts[text]).split())
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."
