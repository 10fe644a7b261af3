"""The prompt source: what a file may hold, in which order it comes, and that the cursor resumes exactly."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from miles_async.arguments import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit
from miles_async.errors import CheckpointError, ConfigurationError, DataError, TrajectoryError
from miles_async.prompts.row import Content
from miles_async.prompts.rows import open_prompts
from miles_async.prompts.source import FilePromptSource
from miles_async.seams import PromptSource
from miles_async.types import JsonObject
from tests.unit.prompts.row_files import write

ROWS = [{"prompt": f"rev {number}", "label": str(number)} for number in range(10)]


def encode(content: Content, tools: object = ()) -> list[int]:
    """One token per character."""
    text = content if isinstance(content, str) else "".join(message["content"] for message in content)
    return [ord(character) for character in text]


def source_of(path: Path, **flags: object) -> FilePromptSource:
    return FilePromptSource(DataArguments(prompt_data=(str(path),), **flags), encode)


def refusal(path: Path, **flags: object) -> str:
    with pytest.raises(DataError) as caught:
        open_prompts(DataArguments(prompt_data=(str(path),), **flags))
    return str(caught.value)


@pytest.fixture
def written(file: Path) -> Callable[[Iterable[JsonObject]], Path]:
    return lambda rows: write(file, rows)


class TestRows:
    def test_a_row_becomes_a_prompt(self, written: Callable[..., Path]):
        path = written(
            [
                {
                    "q": [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}],
                    "a": 7,
                    "m": {"k": [1]},
                }
            ]
        )
        [(epoch, prompt)] = source_of(path, input_key="q", label_key="a", metadata_key="m").take(1)
        assert epoch == 0
        assert prompt.prompt_id == f"{path.name}:1"
        assert prompt.token_ids == (97, 98, 99, 100)
        assert prompt.text == "ab\ncd"
        assert prompt.label == "7"
        assert prompt.metadata == {"k": [1]}

    def test_it_is_a_prompt_source(self, written: Callable[..., Path]):  # covers: M9
        assert isinstance(source_of(written(ROWS)), PromptSource)

    def test_ids_come_from_the_column_or_from_file_and_row(self, written: Callable[..., Path]):
        path = written([row | {"id": 100 + index} for index, row in enumerate(ROWS)])
        by_column = source_of(path, prompt_id_key="id", rollout_shuffle=False).take(10)
        by_row = source_of(path, rollout_shuffle=False).take(10)
        assert [prompt.prompt_id for _, prompt in by_column] == [str(100 + index) for index in range(10)]
        assert [prompt.prompt_id for _, prompt in by_row] == [f"{path.name}:{index}" for index in range(1, 11)]

    def test_texts_are_all_of_any_length_and_move_nothing(self, written: Callable[..., Path]):
        source = source_of(written(ROWS), rollout_max_prompt_len=1)
        before = source.state()
        assert [bytes(text).decode() for text in source.texts()] == [row["prompt"] for row in ROWS]
        assert source.state() == before

    def test_blank_lines_are_counted_and_skipped(self, tmp_path: Path):
        path = tmp_path / "train.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": "1"}\r\n\n  \n{"prompt": "b", "label": "2"}')
        prompts = list(source_of(path).all_prompts())
        assert [(prompt.prompt_id, prompt.text) for prompt in prompts] == [
            ("train.jsonl:1", "a"),
            ("train.jsonl:4", "b"),
        ]


class TestMalformedFiles:
    """Every message names file and line (or row), what was expected and what was found."""

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"prompt": "a", "label": "1"', "not valid JSON"),
            ('["a", "1"]', "a row must be a JSON object"),
            ("null", "a row must be a JSON object"),
            (
                '{"question": "a", "label": "1"}',
                "no key 'prompt' (--input-key); keys of this row: label, question",
            ),
            ('{"prompt": "a", "answer": "1"}', "no key 'label' (--label-key; none: no labels)"),
            ('{"prompt": 7, "label": "1"}', "'prompt' (--input-key) must be a text or a list of messages"),
            ('{"prompt": [], "label": "1"}', "must be a text or a list of messages"),
            ('{"prompt": [{"role": "user"}], "label": "1"}', "must be a text or a list of messages"),
            ('{"prompt": "", "label": "1"}', "'prompt' (--input-key) is an empty text"),
            ('{"prompt": "a", "label": null}', "'label' (--label-key) must be a text or a number"),
            ('{"prompt": "a", "label": [["1"]]}', "found list [['1']]"),
            ("\xff", "not valid JSON"),
        ],
    )
    def test_broken_line_7(self, tmp_path: Path, line: str, message: str):
        path = tmp_path / "train.jsonl"
        lines = [json.dumps(row) for row in ROWS]
        path.write_bytes("\n".join([*lines[:6], line, *lines[6:]]).encode("latin-1"))
        found = refusal(path)
        assert found.startswith(f"{path}:7: ")
        assert message in found

    def test_duplicate_id_names_both_lines(self, written: Callable[..., Path]):
        path = written([row | {"id": index % 8} for index, row in enumerate(ROWS)])
        found = refusal(path, prompt_id_key="id")
        assert found.startswith(f"{path}:9: duplicate id '0'")
        assert "line 1 has it too" in found

    def test_empty_file(self, tmp_path: Path):
        for content in ("", "\n \n"):
            (tmp_path / "train.jsonl").write_text(content)
            assert "holds no prompts" in refusal(tmp_path / "train.jsonl")

    def test_missing_column_of_a_parquet_file_lists_the_columns(self, tmp_path: Path):
        path = write(tmp_path / "train.parquet", ROWS)
        assert refusal(path, input_key="q") == f"{path}: no column 'q' (--input-key); columns: prompt, label"

    def test_files_that_are_no_prompt_files(self, tmp_path: Path):
        assert "cannot read prompt data: No such file" in refusal(tmp_path / "absent.jsonl")
        with pytest.raises(ConfigurationError, match=r"expected a \.jsonl \(also \.gz, \.zst\) or \.parquet"):
            refusal(tmp_path / "train.csv")
        assert "prompt data must be a .jsonl" in refusal(tmp_path / "absent")
        (tmp_path / "train.parquet").write_text("PAR")
        assert "not a readable Parquet file" in refusal(tmp_path / "train.parquet")
        with pytest.raises(ConfigurationError, match="--prompt-data is required"):
            open_prompts(DataArguments())

    def test_messages_without_chat_template(self, tmp_path: Path):
        path = write(tmp_path / "t.jsonl", [{"prompt": [{"role": "user", "content": "a"}], "label": "1"}])
        assert "leave --no-apply-chat-template out" in refusal(path, apply_chat_template=False)

    def test_prompt_without_tokens(self, tmp_path: Path):
        path = write(tmp_path / "t.jsonl", ROWS)
        source = FilePromptSource(DataArguments(prompt_data=(str(path),)), lambda content, tools: [])
        with pytest.raises(DataError, match=r"t\.jsonl:\d+: the tokenizer makes no tokens"):
            source.take(1)

    def test_checking_20000_rows_takes_less_than_a_second(self, tmp_path: Path):
        rows = [{"prompt": [{"role": "user", "content": f"rev {i}"}], "label": f"{i}", "id": i} for i in range(20_000)]
        path = write(tmp_path / "train.jsonl", rows)
        started = time.process_time()
        assert len(open_prompts(DataArguments(prompt_data=(str(path),), prompt_id_key="id"))) == 20_000
        assert time.process_time() - started < 1


class TestOrder:
    def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own(self, written: Callable[..., Path]):
        taken = source_of(written(ROWS)).take(30)
        epochs = [[prompt.text for epoch, prompt in taken if epoch == wanted] for wanted in range(3)]
        assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    def test_order_is_a_function_of_the_seed_not_of_how_it_is_taken(self, tmp_path: Path):
        path = write(tmp_path / "t.jsonl", ROWS)
        whole, parts = source_of(path), source_of(path)
        assert whole.take(25) == parts.take(7) + parts.take(0) + parts.take(18)
        assert source_of(path, rollout_seed=1).take(10) != source_of(path, rollout_seed=2).take(10)

    def test_without_shuffle_it_is_file_order(self, written: Callable[..., Path]):
        taken = source_of(written(ROWS), rollout_shuffle=False).take(12)
        assert [prompt.text for _, prompt in taken] == [row["prompt"] for row in ROWS] + ["rev 0", "rev 1"]
        assert [epoch for epoch, _ in taken] == [0] * 10 + [1] * 2

    def test_all_prompts_does_not_move_the_cursor(self, tmp_path: Path):
        source = source_of(write(tmp_path / "t.jsonl", ROWS))
        before = source.state()
        assert [prompt.text for prompt in source.all_prompts()] == [row["prompt"] for row in ROWS]
        assert source.state() == before


class TestTooLongPrompts:
    LENGTHS = (3, 9, 4, 8, 5)

    def path(self, directory: Path) -> Path:
        return write(directory / "t.jsonl", [{"prompt": "x" * n, "label": "1"} for n in self.LENGTHS])

    def test_they_are_skipped_counted_and_logged_once_each(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        source = source_of(self.path(tmp_path), rollout_max_prompt_len=5)
        with caplog.at_level(logging.WARNING):
            taken = source.take(9)
        assert len(taken) == 9
        assert {len(prompt.token_ids) for _, prompt in taken} == {3, 4, 5}
        assert len(caplog.records) == 2
        assert "(2 prompts skipped so far)" in caplog.text
        assert "9 tokens, and --rollout-max-prompt-len is 5" in caplog.text

    def test_a_file_of_long_prompts_does_not_flood_the_log(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        rows = [{"prompt": "x" * 9, "label": "1"} for _ in range(150)]
        source = source_of(write(tmp_path / "t.jsonl", rows), rollout_max_prompt_len=5)
        with caplog.at_level(logging.WARNING), pytest.raises(DataError):
            source.take(1)
        counts = [int(record.getMessage().split("(")[1].split()[0]) for record in caplog.records]
        assert counts == [1, 2, 3, 4, 5, 10, 100]

    @pytest.mark.parametrize("limit", [None, 3, 9])
    def test_one_short_prompt_is_enough_to_start(self, tmp_path: Path, limit: int | None):
        source_of(self.path(tmp_path), rollout_max_prompt_len=limit).require_usable()

    def test_without_a_short_prompt_nothing_starts(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        with pytest.raises(DataError, match="all 5 prompts have more than 2 tokens"):
            source_of(self.path(tmp_path), rollout_max_prompt_len=2).require_usable()
        assert not caplog.records

    def test_another_limit_says_what_it_is(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        limit = PromptLimit(4, "the model is small", "take a larger one")
        source = FilePromptSource(DataArguments(prompt_data=(str(self.path(tmp_path)),)), encode, limit)
        with caplog.at_level(logging.WARNING):
            assert sorted(len(prompt.token_ids) for prompt in source.all_prompts()) == [3, 4]
        assert "9 tokens, and the model is small" in caplog.text
        none = FilePromptSource(
            DataArguments(prompt_data=(str(self.path(tmp_path)),)), encode, dataclasses.replace(limit, tokens=2)
        )
        with pytest.raises(
            DataError, match=r"all 5 prompts have more than 2 tokens \(the model is small\): take a larger one"
        ):
            none.require_usable()

    @pytest.mark.parametrize("tokens", [-1, 0, 3, 8, 9])
    def test_lengths_above_a_number_of_tokens(self, tmp_path: Path, tokens: int):
        found = source_of(self.path(tmp_path)).lengths_above(tokens)
        assert sorted(found) == sorted(length for length in self.LENGTHS if length > tokens)

    def test_short_prompts_are_not_tokenized_to_find_long_ones(self, tmp_path: Path):
        rows = [{"prompt": "x" * length, "label": "1"} for length in (5, 100, 2000, 30, 1500)]
        tokenized: list[int] = []

        def counting(content: Content, tools: object) -> list[int]:
            tokenized.append(len(content))
            return encode(content)

        source = FilePromptSource(DataArguments(prompt_data=(str(write(tmp_path / "t.jsonl", rows)),)), counting)
        assert sorted(source.lengths_above(1600)) == [2000]
        assert sorted(tokenized) == [5, 2000]  # the first for what a template adds

    def test_a_prompt_of_exactly_the_limit_is_taken(self, tmp_path: Path):
        source = source_of(self.path(tmp_path), rollout_max_prompt_len=9)
        assert len(list(source.all_prompts())) == 5

    def test_an_epoch_without_any_usable_prompt_is_an_error(self, tmp_path: Path):
        source = source_of(self.path(tmp_path), rollout_max_prompt_len=2)
        with pytest.raises(
            DataError, match=r"all 5 prompts have more than 2 tokens .*: raise --rollout-max-prompt-len"
        ):
            source.take(1)
        with pytest.raises(DataError, match="raise --rollout-max-prompt-len"):
            list(source.all_prompts())

    def test_resuming_behind_the_last_usable_prompt_is_not_an_error(self, tmp_path: Path):
        flags: dict[str, object] = {"rollout_max_prompt_len": 3, "rollout_shuffle": False}
        first = source_of(self.path(tmp_path), **flags)
        first.take(1)
        second = source_of(self.path(tmp_path), **flags)
        second.restore(first.state())
        assert second.take(1)[0][0] == 1


class TestCursor:
    """# covers: R11"""

    @pytest.mark.parametrize("taken_before", [0, 1, 9, 10, 11, 25])
    def test_resumes_where_it_was(self, written: Callable[..., Path], taken_before: int):
        path = written(ROWS)
        uninterrupted = source_of(path).take(40)
        first = source_of(path)
        first.take(taken_before)
        state = json.loads(json.dumps(first.state()))
        second = source_of(path)
        second.restore(state)
        assert second.take(40 - taken_before) == uninterrupted[taken_before:]

    def test_refuses_when_the_file_changed(self, written: Callable[..., Path]):
        state = source_of(written(ROWS)).state()
        changed = source_of(written([*ROWS[:-1], ROWS[-1] | {"label": "0"}]))
        with pytest.raises(CheckpointError, match=r"digest was .* Restore --prompt-data"):
            changed.restore(state)

    @pytest.mark.parametrize(("flag", "value"), [("rollout_seed", 7), ("rollout_shuffle", False)])
    def test_refuses_when_the_order_changed(self, tmp_path: Path, flag: str, value: object):
        path = write(tmp_path / "t.jsonl", ROWS)
        with pytest.raises(CheckpointError, match="Restore --" + flag.replace("_", "-")):
            source_of(path, **{flag: value}).restore(source_of(path).state())

    def test_refuses_a_cursor_out_of_range(self, tmp_path: Path):
        source = source_of(write(tmp_path / "t.jsonl", ROWS))
        with pytest.raises(CheckpointError, match="out of range"):
            source.restore(source.state() | {"position": 11})

    def test_a_file_replaced_during_the_run_changes_nothing(self, tmp_path: Path):
        path = write(tmp_path / "t.jsonl", ROWS)
        source = source_of(path, rollout_shuffle=False)
        write(tmp_path / "new.jsonl", [{"prompt": "other", "label": "1"}]).replace(path)
        assert [prompt.text for _, prompt in source.take(10)] == [row["prompt"] for row in ROWS]


def test_arguments_are_not_changed(tmp_path: Path):
    arguments = DataArguments(prompt_data=(str(write(tmp_path / "t.jsonl", ROWS)),))
    copy = dataclasses.replace(arguments)
    FilePromptSource(arguments, encode).take(3)
    assert arguments == copy


class TestRefusedRows:
    """Rows that the chat template refuses: the file is refused at the start, or they are skipped."""

    ROWS = ({"prompt": "rev 1"}, {"prompt": "bad 2"}, {"prompt": "rev 3"}, *({"prompt": "bad"} for _ in range(3)))

    @staticmethod
    def encode(content: Content, tools: object = ()) -> list[int]:
        if str(content).startswith("bad"):
            raise TrajectoryError("the chat template refuses this conversation: roles must alternate")
        return encode(content)

    def source(self, tmp_path: Path, rows: Iterable[JsonObject] = ROWS, **flags: object) -> FilePromptSource:
        path = write(tmp_path / "train.jsonl", rows)
        return FilePromptSource(
            DataArguments(prompt_data=(str(path),), label_key=None, rollout_shuffle=False, **flags), self.encode
        )

    def test_they_refuse_the_file_before_a_prompt_is_taken(self, tmp_path: Path):
        with pytest.raises(DataError) as caught:
            self.source(tmp_path).require_rendered(self.encode)
        assert "train.jsonl:2: the chat template refuses this conversation: roles must alternate" in str(caught.value)
        assert "(and 1 more rows)" in str(caught.value)
        assert "--bad-rows skip" in str(caught.value)

    def test_one_that_only_a_later_step_meets_is_named_too(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"train\.jsonl:2: the chat template refuses"):
            self.source(tmp_path).take(2)

    def test_they_are_skipped_and_counted_on_request(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        source = self.source(tmp_path, bad_rows="skip")
        source.require_rendered(self.encode)
        source.require_usable()
        with caplog.at_level(logging.WARNING):
            assert [prompt.text for _, prompt in source.take(3)] == ["rev 1", "rev 3", "rev 1"]
        reason = "the chat template refuses this conversation: roles must alternate"
        assert f"prompt train.jsonl:2 skipped: {reason}" in caplog.text
        assert "(2 prompts skipped so far)" in caplog.text
        assert len(list(source.texts())) == 2

    def test_a_file_of_nothing_else_is_refused_whatever_the_flag(self, tmp_path: Path):
        refused = r"train\.jsonl: all 1 rows are skipped, the first, .*train\.jsonl:1, since: .*roles must alternate"
        for flags in ({}, {"rollout_max_prompt_len": 9}):
            with pytest.raises(DataError, match=refused):
                self.source(tmp_path, [{"prompt": "bad"}], bad_rows="skip", **flags).require_usable()

    def test_a_note_counts_those_that_will_be_skipped(self, tmp_path: Path):
        (note,) = self.source(tmp_path, bad_rows="skip").skip_notes(self.encode)
        assert note.startswith("4 of 6 rows are skipped (--bad-rows skip), the first: ")
        assert note.endswith("train.jsonl:2: the chat template refuses this conversation: roles must alternate")
        assert not [*self.source(tmp_path, [{"prompt": "rev"}], bad_rows="skip").skip_notes(self.encode)]

    def test_a_large_file_is_looked_at_in_samples(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("miles_async.prompts.row_source.CHECKED_ROWS", 3)
        seen: list[Content] = []
        self.source(tmp_path, [{"prompt": str(n)} for n in range(11)]).require_rendered(
            lambda content, tools: seen.append(content)
        )
        assert seen == ["0", "5", "10"]
