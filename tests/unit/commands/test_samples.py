"""``miles-async samples``: the rows that match, in order; one of them whole; nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from miles_async.commands.samples import samples
from miles_async.errors import ConfigurationError
from miles_async.samples.columns import FileNote, SampleRow
from miles_async.samples.files import SamplesState, file_of
from tests.unit.samples.sample_rows import row, write_file

SAMPLES = (
    row(sample=0, reward=0.5, length=3, response="half right"),
    row(sample=1, reward=1.0, length=9, response="all Right", age=0),
    row(attempt_id=18, sample=0, reward=None, response="cut", finish_reason="length", truncated=True, filtered="equal"),
)
EVALUATED = (row(kind="eval", data_set="aime", attempt_id=-1, reward=0.25, age=None, target_version=None),)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for kind, step, rows in (("train", 10, SAMPLES), ("eval", 10, EVALUATED), ("train", 11, SAMPLES[:1])):
        write(tmp_path, [msgspec.structs.replace(each, kind=kind, step=step) for each in rows])
    return tmp_path


def write(run_dir: Path, rows: Sequence[SampleRow]) -> None:
    kind, step = rows[0].kind, rows[0].step
    note = FileNote(kind=kind, step=step, groups=2, groups_written=2)
    write_file(file_of(run_dir / "samples", kind, step), note, rows)


def shown(run_dir: Path, *words: str) -> str:
    return "".join(samples([str(run_dir), *words]))


def found(run_dir: Path, *words: str) -> list[str]:
    """``STEP GROUP.SAMPLE`` of each row of the table."""
    lines = [line.split() for line in shown(run_dir, *words).splitlines()]
    cells = [line[1:-1] for line in lines if line and line[0].isdecimal()]
    return [" ".join(line[: 1 + next(i for i, word in enumerate(line) if "." in word)]) for line in cells]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "11"], ["11 17.0"]),
        (["--kind", "eval"], ["eval 10 aime -1.0"]),
        (["--data-set", "aime"], ["eval 10 aime -1.0"]),
        (["--step", "10", "--kind", "train"], ["10 17.0", "10 17.1", "10 18.0"]),
        (["--group", "18"], ["10 18.0"]),
        (["--prompt", "train.jsonl:7", "--step", "11"], ["11 17.0"]),
        (["--reward", "0.9:"], ["10 17.1"]),
        (["--reward", ":0.3"], ["eval 10 aime -1.0"]),
        (["--reward", "-1:0.3"], ["eval 10 aime -1.0"]),
        (["--reward", "1"], ["10 17.1"]),
        (["--length", "5:20"], ["10 17.1"]),
        (["--age", "0"], ["10 17.1"]),
        (["--finish-reason", "length"], ["10 18.0"]),
        (["--filtered"], ["10 18.0"]),
        (["--text", "RIGHT", "--step", "10"], ["10 17.0", "10 17.1"]),
        (["--sort", "reward", "--step", "10", "--kind", "train"], ["10 17.1", "10 17.0", "10 18.0"]),
        (["--sort", "reward", "--reverse", "--step", "10", "--kind", "train"], ["10 17.0", "10 17.1", "10 18.0"]),
        (["--sort", "length", "--limit", "1"], ["10 17.1"]),
    ],
)
def test_rows_are_chosen_and_ordered(run_dir: Path, words: list[str], expected: list[str]) -> None:
    assert found(run_dir, *words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reverse"], "--reverse orders what --sort names: give both"),
        (["--tokens"], "--tokens is about the sample of --show: give both"),
        (["--limit", "-1"], "--limit: expected a whole number of at least 1, found '-1'"),
    ],
)
def test_words_without_effect_or_meaning_are_refused(run_dir: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shown(run_dir, *words)


def test_what_the_limit_leaves_out_is_counted(run_dir: Path) -> None:
    assert "and 4 more" in shown(run_dir, "--limit", "1")


def test_nothing_found_says_what_there_is(run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="train: steps 10 to 11; eval: steps 10 to 10"):
        shown(run_dir, "--step", "12")


def test_a_run_without_samples_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--save-samples 0"):
        shown(tmp_path)


def test_one_sample_is_shown_as_a_conversation(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "reasoning_content": "I should compute",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": 'it is "5"'},
    ]
    write(tmp_path, [row(messages=msgspec.json.encode(messages).decode(), reward_parts='{"calls":1.0}')])
    text = shown(tmp_path, "--show", "1")
    assert found(tmp_path, "--text", 'IT is "5"') == ["10 17.0"]
    for expected in ("user", "2 + 3?", "reasoning", "I should compute", "tool calls", '"name": "add"', '{"calls":1.0}'):
        assert expected in text


def test_one_sample_is_shown_by_token_with_what_is_known_of_each(tmp_path: Path) -> None:
    write(tmp_path, [row(trainer_logprobs=[0.0, 0.0, -0.75, -0.25, 0.0])])
    lines = [line.split() for line in shown(tmp_path, "--show", "1", "--tokens").splitlines()]
    tokens = {cells[0]: cells for cells in lines if len(cells) > 5 and cells[0].isdecimal()}
    assert tokens["0"][-2:] == ["prompt", "rev"]
    #                       #    id   version age log-prob advantage trainer difference token
    assert tokens["2"] == ["2", "7", "7", "2", "-0.5", "0.25", "-0.75", "0.25", "2"]
    assert "sampled, without loss" in " ".join(tokens["4"])


def test_a_row_that_is_not_there_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 1"):
        shown(run_dir, "--group", "18", "--show", "2")


@pytest.mark.parametrize("words", [[], ["--show", "1"], ["--show", "1", "--tokens"]])
def test_text_of_models_moves_no_cursor_and_reverses_no_line(tmp_path: Path, words: list[str]) -> None:
    evil = "\x1b[2J\u202e\r\x07[red]"
    rows = [row(response=evil, prompt=evil, label=evil, prompt_id=evil, token_texts=[evil] * 5, filtered=evil)]
    write(tmp_path, rows)
    text = shown(tmp_path, *words)
    assert not {"\x1b", "\u202e", "\r", "\x07"} & set(text)
    assert "\\x1b[2J\\u202e" in text
    assert "[red]" in text  # nor is it markup


def test_markup_in_messages_is_shown_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, [row(messages='[{"role":"user\\u001b[1m","content":"a\\u009bb\\nc"}]')])
    text = shown(tmp_path, "--show", "1")
    assert "a\\x9bb\nc" in text
    assert "user\\x1b[1m" in text


def test_a_file_that_cannot_be_read_is_skipped_and_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(run_dir / "samples", "train", 10).write_bytes(b"PAR1")
    assert found(run_dir) == ["eval 10 aime -1.0", "11 17.0"]
    assert "train-00000010" in capsys.readouterr().err


def test_what_the_limit_on_size_and_the_disk_left_out_is_said(run_dir: Path) -> None:
    state = SamplesState(limit_bytes=2 << 30, train_every=4, dropped=3, stopped="No space left")
    (run_dir / "samples" / "state.json").write_bytes(msgspec.json.encode(state))
    text = shown(run_dir)
    assert "train: one step of 4 is kept, as all took more than 2 GiB" in text
    assert "3 batches" in text
    assert "No space left" in text


def test_no_figure_of_a_token_is_cut(tmp_path: Path) -> None:
    reasons = [1, 2, 0, 0, 3]
    write(tmp_path, [row(mask_reasons=reasons, rollout_logprobs=[0.0, 0.0, -1.597e-05, -9.025e-07, 0.0])])
    text = shown(tmp_path, "--show", "1", "--tokens")
    assert "-1.597e-05" in text
    assert "message or template" in text
    assert "…" not in text


@pytest.mark.parametrize("columns", [None, "80"])
def test_long_texts_take_no_room_from_the_figures(
    tmp_path: Path, columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    long = msgspec.structs.replace(SAMPLES[0], prompt="why? " * 100, response="because " * 200)
    write(tmp_path, [long])
    heading, line = [line for line in shown(tmp_path).splitlines() if "17.0" in line or "reward" in line]
    assert [word for word in ("row", "step", "reward", "tokens", "age", "end") if word not in heading] == []
    assert line.split()[:2] == ["1", str(long.step)]
    assert "why?  → because" in line
