"""Samples on disk: what is read is what was written; half-written and other files are told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from miles_async.errors import DataError
from miles_async.samples.columns import (
    MASK_REASONS,
    METADATA_KEY,
    PER_TOKEN,
    PROMPT,
    SCHEMA_VERSION,
    FileNote,
    SampleRow,
    SampleSummary,
    arrow_schema,
)
from miles_async.samples.files import PARTIAL, SamplesState, file_of, files_in
from miles_async.samples.parquet_writer import FileWriter
from miles_async.samples.reader import read_note, read_rows, read_sample, read_state, read_summaries, samples_files
from tests.unit.samples.sample_rows import row, write_file

NOTE = FileNote(kind="train", step=10, groups=8, groups_written=2, why_fewer="--save-samples 2")
ROWS = [
    row(),
    row(sample=1, reward=None, response="▁\x1b[2J ✓", trainer_logprobs=[0.0, 0.0, -0.5, -0.25, 0.0]),
    row(attempt_id=18, messages='[{"role":"user"}]', turns=[], advantages=None, age=None, target_version=None),
]


def written(directory: Path) -> Path:
    path = file_of(directory / "samples", "train", 10)
    write_file(path, NOTE, ROWS)
    return path


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_rows(path) == ROWS
    assert read_note(path) == NOTE


def test_a_summary_has_the_columns_without_lists(tmp_path: Path) -> None:
    fields = SampleSummary.__struct_fields__
    for summary, whole in zip(read_summaries(written(tmp_path)), ROWS, strict=True):
        assert type(summary) is SampleSummary
        assert [getattr(summary, name) for name in fields] == [getattr(whole, name) for name in fields]


def test_one_sample_is_found_by_its_attempt_and_position(tmp_path: Path) -> None:
    written(tmp_path)
    assert read_sample(tmp_path, "train", 10, 17, 1) == [ROWS[1]]
    assert read_sample(tmp_path, "train", 10, 17, 2) == []
    assert read_sample(tmp_path, "eval", 10, 17, 1) == []


def test_every_column_has_a_type_and_lists_are_per_token() -> None:
    schema = arrow_schema()
    assert schema.names == [*SampleRow.__struct_fields__]
    assert {name for name in schema.names if arrow.types.is_list(schema.field(name).type)} == set(PER_TOKEN)


def test_ages_are_those_of_the_tokens_that_an_engine_sampled() -> None:
    assert row().ages() == [None, None, 2, 1, 1]
    assert row(target_version=None).ages() == [None] * 5
    assert MASK_REASONS[PROMPT] == "prompt"


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    directory = tmp_path / "samples"
    writer = FileWriter(file_of(directory, "eval", 20))
    writer.add(ROWS)
    assert files_in(directory) == []
    assert writer.size() > 0
    writer.close(msgspec.structs.replace(NOTE, kind="eval", step=20))
    assert [(file.kind, file.step) for file in files_in(directory)] == [("eval", 20)]
    assert not list(directory.glob(f"*{PARTIAL}"))


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    writer = FileWriter(file_of(tmp_path, "eval", 20))
    writer.add(ROWS)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_parts_of_a_file_are_read_in_order(tmp_path: Path) -> None:
    path = file_of(tmp_path, "train", 10)
    writer = FileWriter(path)
    writer.add(ROWS[:1])
    writer.add(ROWS[1:])
    writer.close(NOTE)
    assert read_rows(path) == ROWS


def test_a_step_that_is_written_again_replaces_its_file(tmp_path: Path) -> None:
    write_file(written(tmp_path), NOTE, ROWS[:1])
    assert [len(read_rows(file.path)) for file in samples_files(tmp_path)] == [1]


def test_files_are_listed_by_step(tmp_path: Path) -> None:
    directory = tmp_path / "samples"
    for kind, step in (("train", 100), ("train", 20), ("eval", 20)):
        write_file(file_of(directory, kind, step), NOTE, ROWS)
    (directory / "train-00000030.parquet.partial").write_bytes(b"PAR1")
    (directory / "notes.txt").write_text("mine")
    assert [(file.kind, file.step) for file in samples_files(tmp_path)] == [("eval", 20), ("train", 20), ("train", 100)]
    assert samples_files(tmp_path / "nowhere") == []


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="train-00000010"):
        read_rows(path)


def test_other_parquet_files_and_other_schemas_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train-00000001.parquet"
    parquet.write_table(arrow.table({"tokens": [1]}), path)
    with pytest.raises(DataError, match="no note of a samples file"):
        read_summaries(path)
    write_file(path, msgspec.structs.replace(NOTE, schema=SCHEMA_VERSION + 1), ROWS)
    with pytest.raises(DataError, match=f"number {SCHEMA_VERSION + 1}"):
        read_note(path)
    assert METADATA_KEY in parquet.ParquetFile(path).metadata.metadata


def test_the_state_says_what_the_limit_did(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    state = SamplesState(limit_bytes=100, bytes=90, train_every=2)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "state.json").write_bytes(msgspec.json.encode(state))
    assert read_state(tmp_path) == state
    (tmp_path / "samples" / "state.json").write_bytes(b"{")
    with pytest.raises(DataError, match=r"state\.json"):
        read_state(tmp_path)


def test_reading_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from pathlib import Path; from miles_async.samples.reader import samples_files;"
        "samples_files(Path('.')); print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
