"""Questions that the ledger on disk answers about a run.

# covers: C2, C5
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from miles_async.errors import LedgerError
from miles_async.ledger.reader import LedgerReader, Lengths, Settled, open_ledger
from miles_async.ledger.store import LedgerStore
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.events import Changed, Cut, Ended, EpochBegan, Finished, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.types import Changes
from tests.property.builders import make_attempt, make_group

NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> LedgerStore:
    return LedgerStore(tmp_path / "ledger.sqlite")


@pytest.fixture
def reader(store: LedgerStore, tmp_path: Path) -> Iterator[LedgerReader]:
    with open_ledger(tmp_path / "ledger.sqlite") as reader:
        yield reader


def test_an_empty_ledger_has_nothing_to_tell(reader: LedgerReader) -> None:
    assert reader.started_at() == 0.0
    assert reader.attempt_range() is None
    assert reader.prompts_issued() == 0
    assert reader.nearest_prompt("prompts.jsonl:0") is None
    assert reader.response_lengths() == ()
    assert reader.dead_letters() == ()
    assert reader.find("0") == ()


def test_attempts_prompts_and_the_begin_of_the_run(store: LedgerStore, reader: LedgerReader) -> None:
    first, again, other = make_attempt(4), make_attempt(6, "prompts.jsonl:4"), make_attempt(5)
    store.write([(at, Issued(attempt=each)) for at, each in ((50.0, first), (51.0, other), (52.0, again))])
    assert reader.started_at() == 50.0
    assert reader.attempt_range() == (4, 6)
    assert reader.prompts_issued() == 2
    assert [record.attempt_id for record in reader.find(first.prompt.prompt_id)] == [4, 6]
    assert [record.attempt_id for record in reader.find("5")] == [5]
    (record, later) = reader.find(first.prompt.prompt_id)
    assert reader.next_attempt(record) == 6
    assert reader.next_attempt(later) is None


@pytest.mark.parametrize(("column", "value"), [("history", "[1"), ("engines", '"engine-0"'), ("epoch", "one")])
def test_a_row_that_no_run_wrote_is_named(store: LedgerStore, tmp_path: Path, column: str, value: str) -> None:
    store.write([(1.0, Issued(attempt=make_attempt(each))) for each in (4, 5)])
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.execute(f"UPDATE attempts SET {column} = ? WHERE attempt_id = 5", (value,))
    with (
        pytest.raises(LedgerError, match=r"ledger\.sqlite: cannot read this ledger: attempt 5: "),
        open_ledger(tmp_path / "ledger.sqlite") as reader,
    ):
        reader.find("5")


def test_changes_of_settings_are_kept_in_order(store: LedgerStore, reader: LedgerReader) -> None:
    before = {"max_weight_staleness": 2, "lr": 1e-6}
    changes = Changes(after=7, before=before, values={"max_weight_staleness": None, "lr": 2e-6, "evaluation": "now"})
    store.write([(5.0, Changed(changes))])
    assert [str(change) for change in reader.changes()] == [
        "after step 7: max-weight-staleness 2 → none",
        "after step 7: lr 1e-06 → 2e-06",
        "after step 7: evaluation now",
    ]
    assert {change.at for change in reader.changes()} == {5.0}


def test_epochs_are_kept_in_order(store: LedgerStore, reader: LedgerReader) -> None:
    epochs = (EpochBegan("a.jsonl", 0, "random", 8, 0), EpochBegan("a.jsonl", 1, "difficulty", 6, 2))
    store.write([(5.0 + epoch.epoch, epoch) for epoch in epochs])
    assert reader.epochs() == epochs


def test_epochs_of_a_locked_ledger_are_an_error(store: LedgerStore, tmp_path: Path) -> None:
    class Locked(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:  # type: ignore[override]
            raise sqlite3.OperationalError("database is locked")

    with sqlite3.connect(tmp_path / "ledger.sqlite", factory=Locked) as connection, pytest.raises(sqlite3.Error):
        LedgerReader(connection).epochs()


def test_a_number_that_no_attempt_can_have_is_looked_for_as_a_prompt(store: LedgerStore, reader: LedgerReader) -> None:
    store.write([(1.0, Issued(attempt=make_attempt(0)))])
    assert reader.find("9" * 18) == ()
    assert reader.find("9" * 19) == ()  # SQLite has no integer of that size


def test_a_balance_that_is_asked_for_again_counts_only_what_may_have_changed(
    store: LedgerStore, reader: LedgerReader
) -> None:
    settled = Settled()
    assert reader.balance_after(settled) == reader.balance()
    store.write([(1.0, Issued(attempt=make_attempt(number))) for number in (1, 2, 3, 4)])
    for ended, below in ((2, 1), (1, 3), (4, 3), (3, 5)):
        store.write([(2.0, Ended(attempt_id=ended, outcome=Outcome.FILTERED, reason="zero_std"))])
        assert reader.balance_after(settled) == reader.balance()
        assert reader.balance_after(settled) == reader.balance()
        assert settled.below == below
    assert sum(settled.counts.values()) == 4


def test_pages_of_attempts_are_newest_first(store: LedgerStore, reader: LedgerReader) -> None:
    store.write([(1.0, Issued(attempt=make_attempt(number))) for number in (1, 2, 3)])
    store.write([(2.0, Ended(attempt_id=2, outcome=Outcome.FAILED, reason="100 % wrong"))])
    assert [each.attempt_id for each in reader.page()] == [3, 2, 1]
    assert [each.attempt_id for each in reader.page(limit=1, before=3)] == [2]
    assert [each.attempt_id for each in reader.page(end="in_flight")] == [3, 1]
    assert [each.attempt_id for each in reader.page(end="failed", text="0 %")] == [2]
    assert reader.page(text="_") == []


def test_the_nearest_prompt_contains_the_text_or_is_spelt_like_it(store: LedgerStore, reader: LedgerReader) -> None:
    store.write([(1.0, Issued(attempt=make_attempt(12)))])
    assert reader.nearest_prompt("jsonl:1") == "prompts.jsonl:12"
    assert reader.nearest_prompt("promtps.jsnol:12") == "prompts.jsonl:12"
    assert reader.nearest_prompt("z") is None


def test_response_lengths_by_where_their_attempts_ended(store: LedgerStore, reader: LedgerReader) -> None:
    one, two = make_attempt(0), make_attempt(1)
    store.write(
        [
            (0.0, Issued(attempt=one)),
            (0.0, Issued(attempt=two)),
            (1.0, Finished(group=make_group(one, [[0], [0, 0, 0]]))),
            (1.0, Finished(group=make_group(two, [[0, 0]]))),
            (2.0, Ended(attempt_id=0, outcome=Outcome.FILTERED, reason="zero_variance")),
        ]
    )
    assert reader.response_lengths() == (
        Lengths(where="filtered", samples=2, mean=2.0, longest=3),
        Lengths(where="buffered", samples=1, mean=2.0, longest=2),
    )


def test_quarantined_prompts_with_every_reason(store: LedgerStore, reader: LedgerReader) -> None:
    attempt = msgspec.structs.replace(make_attempt(3), history=("data: first",))
    store.write(
        [(0.0, Issued(attempt=attempt)), (1.0, Ended(attempt_id=3, outcome=Outcome.QUARANTINED, reason="data: second"))]
    )
    prompt_id = attempt.prompt.prompt_id
    assert reader.dead_letters() == (DeadLetter(prompt_id=prompt_id, epoch=0, reasons=("data: first", "data: second")),)


def test_nothing_is_held_open_after_the_block(store: LedgerStore, tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger.sqlite") as reader:
        pass
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        reader.started_at()


def test_a_ledger_of_another_format_is_refused(store: LedgerStore, tmp_path: Path) -> None:
    store._connection.execute("UPDATE meta SET value = '0' WHERE key = 'schema_version'")
    store._connection.commit()
    with pytest.raises(LedgerError, match="found 0"), open_ledger(tmp_path / "ledger.sqlite"):
        pass


def test_times_for_a_timeline(store: LedgerStore, reader: LedgerReader) -> None:
    assert (reader.last_at(), reader.trained_at(), reader.first_issued_at(), [*reader.cuts()]) == (0.0, {}, {}, [])
    attempts = {number: make_attempt(number, issued_version=number // 3) for number in (1, 2, 3, 4)}
    groups = {number: make_group(attempt) for number, attempt in attempts.items()}
    store.write([(10.0 + number, Issued(attempt=attempt)) for number, attempt in attempts.items()])
    store.write([(20.0 + number, Finished(group=groups[number])) for number in (1, 2, 3)])
    store.write([(25.0, Cut((2, 1), 0)), (26.0, Cut((3,), 1))])
    store.write([(30.0 + number, Ended(number, Outcome.TRAINED, step=1)) for number in (1, 2)])
    assert reader.trained_at() == {1: 31.0}
    assert reader.first_issued_at() == {0: 11.0, 1: 13.0}
    assert [(cut.at, cut.target_version, cut.groups, cut.oldest_version) for cut in reader.cuts()] == [
        (25.0, 0, 2, 0),
        (26.0, 1, 1, 0),
    ]
    assert reader.last_at() == 32.0
    assert [record.attempt_id for record in reader.alive_since(31.5)] == [2, 3, 4]
    assert [record.attempt_id for record in reader.alive_since(99.0)] == [3, 4]
    assert [reader.newest_issued_at(count) for count in (1, 3, 4, 9)] == [14.0, 12.0, 0.0, 0.0]


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nothing can be written into the directory, by root neither, who becomes another user."""
    directory.chmod(0o555)
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o755)


def test_a_ledger_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot read this ledger"), open_ledger(tmp_path / "ledger.sqlite"):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "files", [("ledger.sqlite",), ("ledger.sqlite", "ledger.sqlite-wal")], ids=["closed", "killed"]
)
def test_a_ledger_in_a_read_only_directory_is_read_to_its_last_row(
    store: LedgerStore, tmp_path: Path, files: tuple[str, ...]
) -> None:
    store.write([(1.0, Issued(attempt=make_attempt(4)))])
    if len(files) == 1:
        store.close()  # which merges the log into the file
    with TemporaryDirectory() as copied:  # tmp_path is closed to other users
        for name in files:
            shutil.copy(tmp_path / name, copied)
        with read_only(Path(copied)):
            with open_ledger(Path(copied) / "ledger.sqlite") as reader:
                assert reader.attempt_range() == (4, 4)
            with pytest.raises(LedgerError), open_ledger(Path(copied) / "absent.sqlite"):
                pass
        assert sorted(os.listdir(copied)) == sorted(files)
