"""The ledger on disk: one row per attempt with its whole life, and no row that contradicts the pool.

# covers: C2
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import msgspec
import pytest

from miles_async.errors import ContractViolation, LedgerError
from miles_async.ledger.reader import open_ledger
from miles_async.ledger.store import LedgerStore
from miles_async.ledger.story import tell
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.events import Checked, Cut, Ended, Finished, Issued, Restored
from miles_async.staleness.ledger import MOST_REASONS, Ledger, Outcome, Stage
from tests.property.builders import make_attempt, make_group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def store(path: Path) -> LedgerStore:
    return LedgerStore(path)


def life(attempt_id: int, *, issued_version: int = 3) -> list:
    """Up to the cut for version 5."""
    attempt = make_attempt(attempt_id, issued_version=issued_version)
    group = make_group(attempt, [[3, 3, 4], [4, 4]])
    noted = [msgspec.structs.replace(s, metadata={"engines": ["engine-1"], "chunks": 2}) for s in group.samples]
    return [
        (10.0, Issued(attempt=attempt)),
        (12.0, Finished(group=msgspec.structs.replace(group, samples=tuple(noted)))),
        (15.0, Cut(attempt_ids=(attempt_id,), target_version=5)),
    ]


def test_a_row_holds_the_whole_life(store: LedgerStore, path: Path) -> None:
    store.write([*life(7), (16.0, Ended(attempt_id=7, outcome=Outcome.TRAINED, step=4))])
    with open_ledger(path) as reader:
        (record,) = reader.find("7")
    assert msgspec.structs.asdict(record) == {
        "attempt_id": 7, "prompt_id": "prompts.jsonl:7", "epoch": 0, "issued_version": 3, "history": (),
        "stage": "cut", "engines": ("engine-1",), "chunks": 4, "response_lengths": (3, 2),
        "oldest_version": 3, "newest_version": 4, "mixed_samples": 1, "reward_mean": 1.0, "left_out": 0,
        "target_version": 5, "step": 4, "outcome": "trained", "reason": None,
        "issued_at": 10.0, "finished_at": 12.0, "cut_at": 15.0, "ended_at": 16.0,
    }  # fmt: skip


def test_attempts_aborted_in_flight_are_told_apart(store: LedgerStore, path: Path) -> None:  # covers: C5, C7
    attempt, other = make_attempt(7, issued_version=3), make_attempt(8)
    reason = "aborted at age 3"
    store.write(
        [
            (10.0, Issued(attempt=attempt)),
            (10.0, Issued(attempt=other)),
            (12.0, Ended(attempt_id=7, outcome=Outcome.STALE_RECYCLED, reason=reason, target_version=6)),
            (12.0, Finished(group=msgspec.structs.replace(make_group(other), aborted=2))),
        ]
    )
    with open_ledger(path) as reader:
        assert reader.balance().aborted == 1
        (record,), (goes_on,) = reader.find("7"), reader.find("8")
    assert goes_on.left_out == 2
    told = "recycled: aborted at age 3 while it was generated, too old for version 6"
    assert told in tell(record, started_at=10.0)


@pytest.mark.parametrize(
    "event",
    [
        (0.0, Ended(attempt_id=0, outcome=Outcome.TRAINED)),  # it has ended
        (0.0, Cut(attempt_ids=(1,), target_version=0)),  # it is being generated
        (0.0, Ended(attempt_id=1, outcome=Outcome.TRAINED)),  # only what was cut is trained
        (0.0, Ended(attempt_id=2, outcome=Outcome.FAILED)),  # it was never issued
        (0.0, Checked(issued=2, live={})),  # the pool has lost one
        (0.0, Checked(issued=2, live={1: Stage.BUFFERED})),
        (0.0, Checked(issued=3, live={1: Stage.IN_FLIGHT})),
    ],
)
def test_an_impossible_event_is_refused_and_nothing_of_its_batch_is_written(
    store: LedgerStore, path: Path, event: object
) -> None:
    ended = (0.0, Ended(attempt_id=0, outcome=Outcome.TRAINED))
    store.write([*life(0), ended, (0.0, Issued(attempt=make_attempt(1)))])
    store.write([(0.0, Checked(issued=2, live={1: Stage.IN_FLIGHT}))])
    with pytest.raises(ContractViolation, match="attempt"):
        store.write([(0.0, Issued(attempt=make_attempt(3))), event])
    with open_ledger(path) as reader:
        assert reader.balance().issued == 2


@pytest.mark.parametrize(
    ("issued", "live", "difference"),
    [
        (1, {}, "0: in_flight, None"),
        (1, {0: Stage.BUFFERED}, "0: in_flight, buffered"),
        (1, {0: Stage.IN_FLIGHT, 5: Stage.CUT}, "5: None, cut"),
        (3, {0: Stage.IN_FLIGHT}, "3 attempts were issued, and the ledger on disk knows 1 and 0 of earlier processes"),
    ],
)
def test_a_pool_that_disagrees_is_told_in_what(
    store: LedgerStore, issued: int, live: dict[int, Stage], difference: str
) -> None:
    store.write([(0.0, Issued(attempt=make_attempt(0))), (0.0, Checked(issued=1, live={0: Stage.IN_FLIGHT}))])
    with pytest.raises(ContractViolation, match=difference):
        store.write([(1.0, Checked(issued=issued, live=live))])


def test_the_balance_on_disk_is_compared_with_the_pools(store: LedgerStore) -> None:
    ledger = Ledger()
    ledger.issue(make_attempt(0))
    store.write([(0.0, Issued(attempt=make_attempt(0)))])
    store.compare(ledger.balance())
    ledger.end(0, Outcome.FAILED, "data: no reward")
    with pytest.raises(ContractViolation, match="the ledger on disk has"):
        store.compare(ledger.balance())


def test_more_reasons_than_the_pool_counts_one_by_one_are_no_difference(store: LedgerStore) -> None:
    """Users' errors may have an id or a time in them, so that all differ."""
    ledger = Ledger()
    for number in range(MOST_REASONS + 2):
        ledger.issue(make_attempt(number))
        ledger.end(number, Outcome.FAILED, f"KeyError: {number}")
        store.write([(0.0, Issued(make_attempt(number))), (0.0, Ended(number, Outcome.FAILED, f"KeyError: {number}"))])
    store.compare(ledger.balance())
    ledger.issue(make_attempt(MOST_REASONS + 2))
    store.write([(0.0, Issued(make_attempt(MOST_REASONS + 2)))])
    ledger.end(MOST_REASONS + 2, Outcome.FILTERED, "too easy")
    store.write([(0.0, Ended(MOST_REASONS + 2, Outcome.FILTERED))])
    with pytest.raises(ContractViolation, match="the ledger on disk has"):
        store.compare(ledger.balance())


def test_a_resumed_run_starts_with_the_balance_it_brings_along(store: LedgerStore, path: Path) -> None:
    # covers: C9
    earlier = Ledger()
    for attempt_id in range(3):
        earlier.issue(make_attempt(attempt_id))
    earlier.end(0, Outcome.FAILED, "data: no reward")
    ledger = Ledger()
    ledger.restore(earlier.state())
    letter = DeadLetter(prompt_id="p9", epoch=0, reasons=("data: no reward",))
    store.write([(0.0, Restored(ledger.balance(), quarantined=(letter,)))])
    store.compare(ledger.balance())
    ledger.issue(make_attempt(3))
    store.write([(0.0, Issued(attempt=make_attempt(3))),
                 (0.0, Checked(issued=4, live={3: Stage.IN_FLIGHT}))])  # fmt: skip
    store.compare(ledger.balance())
    with open_ledger(path) as reader:
        assert reader.balance().summary() == ledger.balance().summary()
        assert reader.balance().summary()["cancelled"] == 2
        assert reader.dead_letters() == (letter,)


def test_metadata_of_a_users_generate_may_be_anything(store: LedgerStore, path: Path) -> None:
    issued, (_, finished), _ = life(0)
    odd = ({}, {"engines": "engine-0", "chunks": "many"})
    samples = [msgspec.structs.replace(s, metadata=m) for s, m in zip(finished.group.samples, odd, strict=True)]
    store.write([issued, (1.0, Finished(group=msgspec.structs.replace(finished.group, samples=tuple(samples))))])
    with open_ledger(path) as reader:
        (record,) = reader.find("0")
    assert (record.engines, record.chunks) == ((), 2)


def test_it_is_read_while_it_is_written(store: LedgerStore, path: Path) -> None:
    store.write(life(0))
    with open_ledger(path) as reader:
        assert reader.balance().cut == 1
        store.write(life(1))
        assert reader.balance().cut == 2


def _write_and_hang(path: Path, ready: object) -> None:
    store = LedgerStore(path)
    for attempt_id in range(50):
        store.write(life(attempt_id))
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def test_a_full_disk_is_the_error_that_surfaces(store: LedgerStore) -> None:
    # covers: C10
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.write([(0.0, Issued(attempt=make_attempt(number))) for number in range(1000)])


def test_a_killed_writer_leaves_all_it_had_written(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_write_and_hang, args=(path, ready))
    process.start()
    assert ready.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with open_ledger(path) as reader:
        assert reader.balance().issued == reader.balance().cut == 50


def test_a_ledger_is_never_overwritten(store: LedgerStore, path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        LedgerStore(path)


def test_a_file_that_is_no_ledger_is_an_error_that_names_it(path: Path) -> None:
    path.write_text("something else, which is long enough not to be taken for an empty database")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: cannot read"), open_ledger(path):
        pass
