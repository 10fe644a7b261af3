"""The order of prompts: shares hold after any number, no row is lost or doubled, and a resume changes nothing.

# covers: R11
"""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from miles_async.arguments import DataArguments
from miles_async.prompts.order import next_stream
from miles_async.prompts.source import FilePromptSource
from miles_async.staleness.events import Finished
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt
from tests.property.builders import make_sample

WEIGHTS = some.lists(some.sampled_from([0.1, 0.3, 1.0, 1.7, 2.0, 5.0, 100.0]), min_size=1, max_size=6)


@given(weights=WEIGHTS, count=some.integers(1, 300))
def test_shares_hold_to_within_one_after_any_number(weights: list[float], count: int) -> None:
    given = [0] * len(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    for number in range(1, count + 1):
        given[next_stream(given, weights)] += 1
        for got, weight in zip(given, exact, strict=True):
            assert abs(got - number * weight / sum(exact)) < 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for file, rows in enumerate((1, 3, 8)):
        lines = (json.dumps({"prompt": f"{file} {row}", "label": "1"}) for row in range(rows))
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return folder


@settings(max_examples=60, deadline=None)
@given(
    files=some.lists(some.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True),
    weighted=some.booleans(),
    shuffled=some.booleans(),
    seed=some.integers(0, 3),
    parts=some.lists(some.integers(0, 15), min_size=1, max_size=4),
)
def test_every_epoch_has_every_row_once_and_resumes_change_nothing(
    folder: Path, files: list[int], weighted: bool, shuffled: bool, seed: int, parts: list[int]
) -> None:
    def source() -> FilePromptSource:
        arguments = DataArguments(
            prompt_data=tuple(str(folder / f"{file}.jsonl") for file in files),
            prompt_data_weights=tuple(str(file + 1) for file in files) if weighted else (),
            rollout_shuffle=shuffled,
            rollout_seed=seed,
        )
        return FilePromptSource(arguments, lambda content, tools: str(content).encode())

    taken = source().take(sum(parts))
    again, state = [], None
    for part in parts:
        resumed = source()
        if state is not None:
            resumed.restore(json.loads(json.dumps(state)))
        again += resumed.take(part)
        state = resumed.state()
    assert again == taken

    streams = [[file] for file in files] if weighted and len(files) > 1 else [files]
    for stream in streams:
        rows = Counter((epoch, prompt.prompt_id) for epoch, prompt in taken if int(prompt.text[0]) in stream)
        size = sum((1, 3, 8)[file] for file in stream)
        assert set(rows.values()) <= {1}
        per_epoch = Counter(epoch for epoch, _ in rows)
        assert all(per_epoch[epoch] == size for epoch in range(max(per_epoch, default=0)))


@settings(max_examples=60, deadline=None)
@given(
    outside=some.sets(some.integers(0, 7)),
    rest=some.integers(2, 5),
    seed=some.integers(0, 5),
    cut=some.integers(0, 30),
)
def test_with_a_window_those_inside_come_in_every_epoch_and_others_in_one_of_a_few(
    folder: Path, outside: set[int], rest: int, seed: int, cut: int
) -> None:
    place = str(folder / "2.jsonl")
    flags = {"prompt_sampler": "difficulty", "difficulty_rest": rest, "rollout_seed": seed}

    def source() -> FilePromptSource:
        return FilePromptSource(DataArguments(prompt_data=(place,), **flags), lambda content, tools: (1,))

    def tried(opened: FilePromptSource) -> FilePromptSource:
        for _, prompt in opened.take(8):
            rewards = [1.0, 1.0] if int(prompt.text.split()[1]) in outside else [0.0, 1.0]
            samples = [make_sample([0], reward=reward) for reward in rewards]
            opened.note(Finished(group_of(Attempt(attempt_id=0, prompt=prompt, epoch=0), samples)))
        return opened

    count = rest * (8 - len(outside)) + len(outside)  # of ``rest`` epochs
    whole = tried(source()).take(count)
    times = Counter(prompt.text for _, prompt in whole)
    assert times == {f"2 {row}": 1 if row in outside else rest for row in range(8)}
    assert max(Counter((epoch, prompt.text) for epoch, prompt in whole).values()) == 1

    first, second = tried(source()), source()
    begin = first.take(min(cut, count))
    second.restore(json.loads(json.dumps(first.state())))
    assert begin + second.take(count - len(begin)) == whole
