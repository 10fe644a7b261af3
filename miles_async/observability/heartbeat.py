"""State of a run, read from its ledger: printed after a minute without a step, and by ``miles-async status``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from miles_async.errors import LedgerError
from miles_async.ledger.reader import Settled, open_ledger
from miles_async.ledger.story import counted
from miles_async.observability.progress import Progress
from miles_async.staleness.ledger import Balance, Outcome

log = structlog.get_logger(__name__)

QUIET_SECONDS = 60.0  # without a step, a phase or a heartbeat
LONGEST_REASON = 80  # characters; errors of engines can be pages


@asynccontextmanager
async def heartbeat(progress: Progress, ledger: Path, seconds: float = QUIET_SECONDS) -> AsyncIterator[None]:
    """Print heartbeats while the body runs. ``ledger``: of this run, as its rollout side writes it."""
    task = asyncio.create_task(_beat(progress, ledger, seconds), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _beat(progress: Progress, ledger: Path, seconds: float) -> None:
    settled = Settled()
    while True:
        await asyncio.sleep(max(seconds - progress.quiet_seconds, 0.01))
        if progress.quiet_seconds < seconds:
            continue
        try:
            balance = await asyncio.to_thread(read_balance, ledger, settled)
            doing = "" if balance is None else await asyncio.to_thread(standing_line, balance, ledger)
            progress.heartbeat(doing)
        except Exception as error:  # supervision point: a display never ends training
            log.warning("the heartbeat ends; the run continues", error=repr(error))
            return


def read_balance(ledger: Path, settled: Settled | None = None) -> Balance | None:
    """The balance as of the ledger's last flush; None if there is no ledger yet, or none that can be read.

    ``settled``: of a caller that asks again and again.
    """
    if not ledger.is_file():
        return None
    try:
        with open_ledger(ledger) as reader:
            return reader.balance() if settled is None else reader.balance_after(settled)
    except LedgerError:
        return None


def generation_paused(ledger: Path) -> bool:
    """True if the last of the ledger's requests for generation is to pause."""
    try:
        with open_ledger(ledger) as reader:
            asked = [change.value for change in reader.changes() if change.name == "generation"]
    except LedgerError:
        return False
    return asked[-1:] == ["paused"]


def standing_line(balance: Balance, ledger: Path) -> str:
    """Groups in flight, buffered, and filtered or failed with the most common reason; then what the run waits for."""
    parts = [f"{counted(balance.in_flight, 'group')} in flight", f"{balance.buffered} buffered"]
    finished = sum(balance.ended.values()) + balance.buffered + balance.cut
    for outcome in (Outcome.FILTERED, Outcome.FAILED):
        if count := balance.ended.get(outcome, 0):
            reason = commonest_reason(balance, outcome)
            parts.append(f"{count} of {finished} finished ones {outcome}" + (f" (mostly: {reason})" if reason else ""))
    return f"{', '.join(parts)}; {waits_for(balance, ledger)}"


def waits_for(balance: Balance, ledger: Path) -> str:
    """Name the cause of the wait for the next step, judging by the states of groups."""
    if balance.cut:
        return f"{counted(balance.cut, 'group')} {'is' if balance.cut == 1 else 'are'} with the trainer"
    if balance.in_flight:
        return "the trainer waits for groups in flight"
    if generation_paused(ledger):
        return "nothing is in flight: generation is paused until `miles-async set RUN_DIR generation=running`"
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
