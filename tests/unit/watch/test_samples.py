"""Samples on the page: lists of a step, search over all steps, one sample with its tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miles_async.errors import DataError
from miles_async.samples.columns import MASK_REASONS, SampleRow
from miles_async.samples.files import file_of
from miles_async.samples.reader import samples_files
from miles_async.watch import sample_files
from miles_async.watch.run import Run, open_runs
from miles_async.watch.server import encode
from miles_async.watch.views.samples import LONGEST_TEXT, TOKENS, sample, samples, search
from tests.unit.samples.sample_rows import row, write_samples
from tests.unit.watch.run_files import HOSTILE, write_finished_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_runs([write_finished_run(tmp_path / "run")])[0]


def write(run: Run, *rows: SampleRow) -> None:
    write_samples(run.directory, "train", 10, rows)


def test_the_newest_step_is_shown_first(run: Run) -> None:
    found = samples(run, "train", None)
    assert found["steps"] == {"train": [10, 20, 30], "eval": [20]}
    assert found["step"] == 30
    assert [(each["attempt_id"], each["sample"]) for each in found["rows"]] == [
        (a, n) for a in (1, 2) for n in range(4)
    ]
    assert [each["reward"] for each in found["rows"][:4]] == [0.0, 0.25, 0.5, 0.75]
    assert found["rows"][0]["turns"] == 1
    assert found["notes"] == ["2 of 3 groups: the share of --save-samples"]
    assert samples(run, "train", 10)["rows"][0]["step"] == 10
    assert samples(run, "eval", None)["rows"][0]["data_set"] == "test"


def test_a_list_has_short_texts(run: Run) -> None:
    write(run, row(prompt="p" * 1_000_000, response="ä" * 1_000_000))
    (found,) = samples(run, "train", 10)["rows"]
    assert found["prompt"] == "p" * sample_files.PREVIEW
    assert found["response"] == "ä" * sample_files.PREVIEW
    assert len(encode(samples(run, "train", 10))) < 5_000


def test_a_step_that_is_written_again_is_read_again(run: Run) -> None:
    samples(run, "train", 10)
    write(run, row(response="new"))
    path = file_of(run.directory / "samples", "train", 10)
    os.utime(path, ns=(0, 0))
    assert [each["response"] for each in samples(run, "train", 10)["rows"]] == ["new"]


def test_a_run_without_samples_says_so(run: Run, tmp_path: Path) -> None:
    bare = Run(tmp_path, "bare")
    found = samples(bare, "train", None)
    assert (found["step"], found["rows"]) == (None, [])
    assert "--save-samples" in found["notes"][0]
    with pytest.raises(DataError):
        sample(bare, "train", 1, 1, 0)


def test_a_file_that_is_removed_or_torn_is_said(run: Run) -> None:
    path = file_of(run.directory / "samples", "train", 30)
    path.write_bytes(b"PAR1 torn")
    found = samples(run, "train", 30)
    assert found["rows"] == []
    assert str(path) in found["notes"][0]
    found = search(run, "train", "answer 1 of")
    assert [each["step"] for each in found["rows"]] == [20, 20, 10, 10]
    assert [str(path) in note for note in found["notes"]] == [True]


def test_all_samples_are_searched_newest_first(run: Run) -> None:
    found = search(run, "train", "ANSWER 2 of")
    assert [(each["step"], each["attempt_id"]) for each in found["rows"]] == [
        (step, attempt) for step in (30, 20, 10) for attempt in (1, 2)
    ]
    assert found["next"] is None
    assert [each["step"] for each in search(run, "train", "answer 2 of", before=19)["rows"]] == [10, 10]
    assert search(run, "train", "(no regular expression")["rows"] == []


def test_every_turn_of_a_conversation_is_searched(run: Run) -> None:
    call = {"function": {"name": "multiply", "arguments": '{"a": 6}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": 'says "42"\nand ä'}]
    write(run, row(messages=json.dumps([*turns, {"role": "assistant", "content": "done"}]), response="done"), row())
    for text in ("MULTIPLY", '{"a": 6}', 'says "42"\nand', "done"):
        assert [each["response"] for each in search(run, "train", text)["rows"]] == ["done"], text
    assert search(run, "train", "messages")["rows"] == []


def test_a_long_search_says_where_it_stopped(run: Run) -> None:
    ticks = iter(range(100))
    files = [each for each in samples_files(run.directory) if each.kind == "train"]
    found = sample_files.search(files, "answer", clock=lambda: next(ticks) * 0.4)
    assert {each["step"] for each in found["rows"]} == {30, 20}
    assert found["next"] == 10


def test_a_sample_has_its_tokens_and_its_group(run: Run) -> None:
    found = sample(run, "train", 20, 2, 3)
    (branch,) = found["branches"]
    assert found["reasons"] == MASK_REASONS
    assert found["group"] == [{"sample": number, "reward": number / 4} for number in range(4)]
    assert branch["conversation"][1] == {"role": "assistant", "text": HOSTILE, "characters": len(HOSTILE)}
    window = branch["window"]
    assert (window["first"], window["tokens"]) == (0, 5)
    assert window["texts"][2] == HOSTILE
    assert window["ages"] == [None, None, 2, 1, 1]
    assert window["differences"] == pytest.approx([0.0, 0.0, 0.25, 0.0, 0.0])
    assert window["entropies"] == [0.0, 0.0, 1.5, 0.5, 0.0]


def test_an_example_has_the_trainer_s_log_probs_and_no_engine_s(run: Run) -> None:
    trainer = [0.0, 0.0, -0.75, -0.25, 0.0]
    write(run, row(oldest_version=None, target_version=None, rollout_logprobs=[0.0] * 5, trainer_logprobs=trainer))
    (branch,) = sample(run, "train", 10, 17, 0)["branches"]
    window = branch["window"]
    assert (window["logprobs"], window["differences"], window["trainer_logprobs"]) == (None, None, trainer)


def test_a_prompt_without_messages_is_shown_as_text(run: Run) -> None:
    (branch,) = sample(run, "train", 20, 1, 2)["branches"]
    assert [(each["role"], each["text"]) for each in branch["conversation"]] == [
        ("prompt", "<|user|>rev 1"),
        ("response", "answer 2 of 20"),
    ]


def test_long_samples_arrive_in_parts(run: Run) -> None:
    count = 10_000
    columns = {
        name: [0.0] * count for name in ("loss_mask", "mask_reasons", "rollout_logprobs", "advantages", "tokens")
    }
    whole = {name: [int(each) for each in values] for name, values in columns.items() if "log" not in name}
    lists = {**columns, **whole, "advantages": [0.5] * count, "weight_versions": [1] * count}
    text = "x" * 1_000_000
    write(run, row(response=text, token_texts=["t"] * count, prompt_length=100, length=count - 100, **lists))
    (branch,) = sample(run, "train", 10, 17, 0)["branches"]
    assert (branch["window"]["first"], len(branch["window"]["texts"])) == (50, TOKENS)
    assert branch["conversation"][1] == {"role": "response", "text": text[:LONGEST_TEXT], "characters": len(text)}
    (later,) = sample(run, "train", 10, 17, 0, first=9_500, whole=True)["branches"]
    assert len(later["window"]["texts"]) == 500
    assert later["conversation"][1]["text"] == text


def test_tool_calls_and_reasoning_are_parts_of_a_conversation(run: Run) -> None:
    call = '{"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [{"id": "1"}]}'
    write(run, row(messages=f'[{call}, {{"role": "tool", "content": [1]}}, 7]'))
    (branch,) = sample(run, "train", 10, 17, 0)["branches"]
    assert [each["role"] for each in branch["conversation"]] == [
        "assistant, reasoning",
        "assistant, tool calls",
        "tool",
    ]
