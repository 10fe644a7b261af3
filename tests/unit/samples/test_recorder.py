"""The recorder writes a share of every batch and all evaluations, and never ends or delays a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from structlog.testing import capture_logs

from miles_async.arguments import ObservabilityArguments
from miles_async.errors import DataError
from miles_async.samples import recorder as recorder_module
from miles_async.samples.evaluation import EvaluationSamples
from miles_async.samples.files import PARTIAL, SamplesFile, SamplesState, files_in
from miles_async.samples.reader import read_note, read_rows, read_state, samples_files
from miles_async.samples.recorder import SampleRecorder, sample_recorder
from miles_async.staleness.events import Ended, Finished
from miles_async.staleness.ledger import Outcome
from miles_async.train_data.batch import tabulate
from miles_async.types import Attempt, Group, Prompt, TokenScores
from tests.unit.samples.groups import decode, group, sample

LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def _writing_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FINISH_SECONDS", 150.0)


@contextmanager
def recording(run_dir: Path, *, groups: int = 2, limit: int = LIMIT, **options: bool) -> Iterator[SampleRecorder]:
    """A recorder, whose files are written afterwards."""
    yield (recorder := SampleRecorder(run_dir / "samples", groups=groups, limit_bytes=limit, decode=decode, **options))
    recorder.finish()


@contextmanager
def evaluating(
    run_dir: Path, *, complete: bool = True, **options: Any
) -> Iterator[tuple[SampleRecorder, EvaluationSamples]]:
    with recording(run_dir, **options) as recorder:
        yield recorder, (evaluation := recorder.evaluation(20))
        evaluation.close(complete=complete)


def state_of(run_dir: Path) -> SamplesState:
    state = read_state(run_dir)
    assert state is not None
    return state


def batch(recorder: SampleRecorder, step: int, groups: tuple[Group, ...]) -> None:
    advantages = np.arange(sum(len(group.samples) for group in groups), dtype=np.float32)
    recorder.batch(step, 9, groups, tabulate(groups, advantages))
    recorder.trained(step)


def eval_attempt(number: int) -> Attempt:
    return Attempt(attempt_id=-number, prompt=Prompt(prompt_id=f"test:{number}", token_ids=(0, 1), text="t"), epoch=0)


def test_a_share_of_a_batch_is_written_with_its_advantages(tmp_path: Path) -> None:
    groups = tuple(group(number, sample("a"), sample("b")) for number in range(6))
    with recording(tmp_path) as recorder:
        batch(recorder, 3, groups)
    (file,) = samples_files(tmp_path)
    rows, note = read_rows(file.path), read_note(file.path)
    assert (file.kind, file.step, len(rows)) == ("train", 3, 4)
    assert [row.advantage for row in rows] == [2.0 * row.attempt_id + row.sample for row in rows]
    assert (note.groups, note.groups_written, note.why_fewer) == (6, 2, "--save-samples 2")


def test_a_batch_is_written_once_it_is_trained_with_the_trainer_s_scores(tmp_path: Path) -> None:
    groups = tuple(group(number, sample("a"), sample("b")) for number in range(6))
    with recording(tmp_path) as recorder:
        recorder.batch(3, 9, groups, tabulate(groups, np.zeros(12, np.float32)))
        first, second = recorder.chosen(3, 6)
        logprobs, entropies = np.array([0, 0, -0.75, -1.5], np.float32), np.array([0, 0, 2, 3], np.float32)
        scores = [
            TokenScores(branch=2 * first + 1, logprobs=logprobs, entropies=entropies),
            TokenScores(branch=2 * second, logprobs=logprobs, entropies=None),
        ]
        assert samples_files(tmp_path) == []
        recorder.trained(3, scores)
    rows = read_rows(samples_files(tmp_path)[0].path)
    assert [(row.attempt_id, row.sample) for row in rows] == [(first, 0), (first, 1), (second, 0), (second, 1)]
    assert [row.trainer_logprobs for row in rows] == [None, [*logprobs], [*logprobs], None]
    assert [row.entropies for row in rows] == [None, [*entropies], None, None]
    assert [row.logprob_difference for row in rows] == [None, 0.625, 0.625, None]  # engine: -0.5 each


def test_a_batch_that_is_never_trained_is_written_at_the_end(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        recorder.batch(3, 9, (group(1),), tabulate([group(1)], np.zeros(1, np.float32)))
    (row,) = read_rows(samples_files(tmp_path)[0].path)
    assert row.trainer_logprobs is None


def test_steps_take_different_groups_and_a_small_batch_is_written_whole(tmp_path: Path) -> None:
    groups = tuple(group(number) for number in range(20))
    with recording(tmp_path) as recorder:
        for step in range(1, 9):
            batch(recorder, step, groups)
        batch(recorder, 9, groups[:1])
    *many, small = [[row.attempt_id for row in read_rows(file.path)] for file in samples_files(tmp_path)]
    assert len({attempt for step in many for attempt in step}) > 8
    assert small == [0]
    assert read_note(samples_files(tmp_path)[-1].path).why_fewer is None


def test_groups_that_were_filtered_are_in_the_next_file_with_the_reason(tmp_path: Path) -> None:
    with recording(tmp_path, groups=1) as recorder:
        for number in (4, 5):  # one is enough
            recorder.note(Finished(group(number)))
            recorder.note(Ended(number, Outcome.FILTERED, "all rewards are equal"))
        recorder.note(Finished(group(6)))
        recorder.note(Ended(7, Outcome.FILTERED, "of another attempt"))
        batch(recorder, 1, (group(8),))
        batch(recorder, 2, (group(9),))
    found = [[(row.attempt_id, row.filtered) for row in read_rows(file.path)] for file in samples_files(tmp_path)]
    assert found == [[(4, "all rewards are equal"), (8, None)], [(9, None)]]


def test_an_evaluation_is_one_file_with_all_data_sets(tmp_path: Path) -> None:
    with evaluating(tmp_path) as (_, evaluation):
        for number in range(1, 101):
            for index in (1, 0):
                data_set, attempt = "aime" if number % 2 else "gsm", eval_attempt(number)
                evaluation.add(data_set, attempt, index, sample(f"{number}"), samples=2)
    (file,) = samples_files(tmp_path)
    rows, note = read_rows(file.path), read_note(file.path)
    assert [(row.attempt_id, row.sample) for row in rows] == [(-n, i) for n in range(1, 101) for i in (0, 1)]
    assert {(row.kind, row.step, row.samples, row.age) for row in rows} == {("eval", 20, 2, None)}
    assert {row.data_set for row in rows} == {"aime", "gsm"}
    assert (note.groups, note.groups_written, note.why_fewer) == (100, 100, None)


def test_an_interrupted_evaluation_is_readable_and_says_so(tmp_path: Path) -> None:
    with evaluating(tmp_path, complete=False) as (_, evaluation):
        evaluation.add("aime", eval_attempt(1), 0, sample(), samples=1)
    assert read_note(samples_files(tmp_path)[0].path).why_fewer == "the evaluation was interrupted"


@pytest.mark.parametrize("only_file", [False, True])
def test_an_evaluation_gets_an_eighth_of_the_limit_and_all_of_it_if_there_is_nothing_else(
    tmp_path: Path, only_file: bool
) -> None:
    with evaluating(tmp_path, limit=200_000, only_file=only_file) as (_, evaluation):
        for number in range(1, 1001):
            evaluation.add("aime", eval_attempt(number), 0, sample(), samples=1)
    note = read_note(samples_files(tmp_path)[0].path)
    if only_file:
        assert (note.groups_written, note.why_fewer) == (1000, None)
    else:
        assert 0 < note.groups_written < note.groups == 1000
        assert note.why_fewer == "an evaluation gets at most 2.33e-05 GiB of --save-samples-gib"


def test_at_the_limit_every_second_step_goes_and_the_whole_run_stays_covered(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        batch(recorder, 1, (group(1),))
    size = samples_files(tmp_path)[0].path.stat().st_size
    with recording(tmp_path / "small", limit=5 * size) as recorder:
        for step in range(1, 33):
            batch(recorder, step, (group(1),))
    state = state_of(tmp_path / "small")
    assert [file.step for file in samples_files(tmp_path / "small")] == [1, 9, 17, 25]
    assert (state.train_every, state.eval_every) == (8, 1)
    assert state.bytes <= state.limit_bytes


def test_files_that_people_remove_make_room_for_others(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        batch(recorder, 1, (group(1),))
    (only,) = samples_files(tmp_path)
    with recording(tmp_path, limit=only.path.stat().st_size * 3 // 2) as recorder:
        only.path.unlink()
        batch(recorder, 2, (group(2),))
    state = state_of(tmp_path)
    assert [file.step for file in samples_files(tmp_path)] == [2]
    assert state.train_every == 1


def test_a_file_that_is_removed_while_files_are_counted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_one_that_goes(directory: Path) -> list[SamplesFile]:
        return [*files_in(directory), SamplesFile(9, "train", directory / "train_0000009.parquet")]

    monkeypatch.setattr("miles_async.samples.store.files_in", with_one_that_goes)
    with recording(tmp_path) as recorder:
        batch(recorder, 1, (group(1),))
    assert [file.step for file in samples_files(tmp_path)] == [1]


def test_a_disk_that_cannot_be_written_is_one_warning_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    with capture_logs() as logs, recording(tmp_path) as recorder:
        for step in range(1, 4):
            batch(recorder, step, (group(step),))
    assert [entry["log_level"] for entry in logs].count("warning") == 1


def test_a_disk_that_fills_leaves_readable_files_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as recorder:
        batch(recorder, 1, (group(1),))
    with recording(tmp_path) as recorder:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr("miles_async.samples.parquet_writer.FileWriter.close", full)
        batch(recorder, 2, (group(2),))
    assert [file.step for file in samples_files(tmp_path)] == [1]
    state = state_of(tmp_path)
    assert "No space left" in (state.stopped or "")
    assert not list((tmp_path / "samples").glob(f"*{PARTIAL}"))


def test_one_batch_that_cannot_be_shown_does_not_stop_the_others(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        batch(recorder, 1, (group(1, sample(metadata={"turn_spans": [[[0]]]})),))  # not what a Generate may return
        batch(recorder, 2, (group(2),))
    assert [file.step for file in samples_files(tmp_path)] == [2]


def test_a_slow_disk_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CAPACITY", 2)
    gate = threading.Event()
    with recording(tmp_path) as recorder:
        recorder.queue(lambda: gate.wait(10) and None)
        for step in range(1, 30):
            batch(recorder, step, (group(step),))
        gate.set()
    state = state_of(tmp_path)
    assert state.dropped + len(samples_files(tmp_path)) == 29
    assert state.dropped > 20


def test_an_evaluation_on_a_slow_disk_is_completed_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "CAPACITY", 2)
    gate = threading.Event()
    with recording(tmp_path) as recorder:
        evaluation = recorder.evaluation(20)
        for index in range(64 * 5):
            evaluation.add("aime", eval_attempt(1 + index // 64), index % 64, sample(), samples=64)
            if index == 63:
                recorder.queue(lambda: gate.wait(10) and None)
        evaluation.close(complete=True)
        gate.set()
    (file,) = samples_files(tmp_path)
    lost = 64 * 5 - len(read_rows(file.path))
    assert lost >= 64
    why = read_note(file.path).why_fewer
    assert why is not None
    assert why.startswith(f"{lost} samples were not written")


def test_samples_that_cannot_be_written_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with evaluating(tmp_path) as (recorder, evaluation):
        for index in range(64 * 2):
            evaluation.add("aime", eval_attempt(1), index, sample(), samples=128)
            if index == 63:
                done = threading.Event()
                recorder.queue(done.set)
                done.wait(60)
                monkeypatch.setattr("miles_async.samples.evaluation.rows_of", None)
    (file,) = samples_files(tmp_path)
    assert (read_note(file.path).why_fewer or "").startswith("64 samples were not written")


@pytest.mark.parametrize("only_file", [False, True])
def test_the_end_waits_for_the_only_file_while_the_disk_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_file: bool
) -> None:
    monkeypatch.setattr(recorder_module, "FINISH_SECONDS", 0.2)
    with evaluating(tmp_path, only_file=only_file) as (recorder, evaluation):
        for _ in range(8):
            recorder.queue(lambda: time.sleep(0.1))
        evaluation.add("aime", eval_attempt(1), 0, sample(), samples=1)
    assert len(samples_files(tmp_path)) == only_file


def test_a_step_that_is_trained_again_replaces_its_file(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with recording(tmp_path) as recorder:
            batch(recorder, 5, (group(attempt),))
    (file,) = samples_files(tmp_path)
    assert [row.attempt_id for row in read_rows(file.path)] == [2]


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        recorder.finish()
        batch(recorder, 1, (group(1),))
    assert samples_files(tmp_path) == []
    with pytest.raises(DataError):
        read_rows(tmp_path / "samples" / "train-00000001.parquet")


def test_examples_have_no_reward_no_version_and_no_age(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path / "samples", groups=2, limit_bytes=LIMIT, decode=decode, sampled=False)
    groups = (group(1, sample(reward=0.0)),)
    recorder.batch(1, 9, groups, tabulate(groups, np.zeros(1, np.float32)))
    recorder.trained(1, [TokenScores(branch=0, logprobs=np.array([0, 0, -1, -2], np.float32), entropies=None)])
    recorder.finish()
    (row,) = read_rows(samples_files(tmp_path)[0].path)
    assert (row.reward, row.age, row.oldest_version, row.advantages) == (None, None, None, None)
    assert (row.trainer_logprobs, row.logprob_difference) == ([0, 0, -1, -2], None)
    assert row.ages() == [None] * 4
    assert row.mask_reasons == [1, 1, 0, 0]


def test_without_groups_nothing_is_recorded(tmp_path: Path) -> None:
    assert sample_recorder(ObservabilityArguments(run_dir=tmp_path, save_samples=0), decode) is None
