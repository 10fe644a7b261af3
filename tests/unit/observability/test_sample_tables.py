"""Samples on disk as tables: each file once, of the steps that were asked for, bounded in size."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.errors import DataError
from miles_async.observability.wandb_tracker import COLUMNS, MOST_CHARACTERS, MOST_ROWS, SampleTables
from tests.unit.samples.sample_rows import row, write_samples


def taken(tables: SampleTables) -> list[tuple[str, int]]:
    return [(table.name, table.step) for table in tables.new()]


def test_each_file_is_taken_once(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, 1)
    assert taken(tables) == []
    write_samples(tmp_path, "train", 1)
    assert taken(tables) == [("samples/train", 1)]
    write_samples(tmp_path, "eval", 1)
    write_samples(tmp_path, "train", 2)
    assert taken(tables) == [("samples/eval", 1), ("samples/train", 2)]
    assert taken(tables) == []


def test_steps_between_are_left_out_and_evaluations_are_not(tmp_path: Path) -> None:
    for step in (1, 5, 10):
        write_samples(tmp_path, "train", step)
    write_samples(tmp_path, "eval", 3)
    assert taken(SampleTables(tmp_path, 5)) == [("samples/eval", 3), ("samples/train", 5), ("samples/train", 10)]


def test_a_row_has_what_the_sample_has(tmp_path: Path) -> None:
    sample = row(step=1, reward=0.5, response="21")
    write_samples(tmp_path, "train", 1, [sample])
    [table] = SampleTables(tmp_path, 1).new()
    [cells] = table.rows
    found = dict(zip(COLUMNS, cells, strict=True))
    assert found == {name: getattr(sample, name) for name in COLUMNS}
    assert (found["reward"], found["response"]) == (0.5, "21")


def test_a_table_is_bounded(tmp_path: Path) -> None:
    long = "a" * MOST_CHARACTERS + "b" * MOST_CHARACTERS
    write_samples(tmp_path, "train", 1, [row(step=1, attempt_id=n, response=long) for n in range(MOST_ROWS + 5)])
    [table] = SampleTables(tmp_path, 1).new()
    assert len(table.rows) == MOST_ROWS
    response = table.rows[0][COLUMNS.index("response")]
    assert isinstance(response, str)
    assert len(response) < MOST_CHARACTERS + 100
    assert (response[:1], response[-1:]) == ("a", "b")
    assert f"({MOST_CHARACTERS} of {len(long)} characters left out)" in response


def test_a_file_that_cannot_be_read_is_reported_once(tmp_path: Path) -> None:
    write_samples(tmp_path, "train", 1).write_bytes(b"torn")
    write_samples(tmp_path, "train", 2)
    tables = SampleTables(tmp_path, 1)
    with pytest.raises(DataError):
        taken(tables)
    assert taken(tables) == [("samples/train", 2)]
