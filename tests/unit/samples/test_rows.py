"""Rows of a group: every token with its text and what the run knows of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from miles_async.samples.columns import FORCED, LOSS, NOT_SAMPLED, OTHER_BRANCH, PROMPT, SAMPLED, SampleRow
from miles_async.samples.rows import Place, TokenTexts, mask_reasons, rows_of
from miles_async.types import NO_VERSION, Branch, TurnSpan
from tests.unit.samples.groups import decode, group, sample

TRAIN = Place(kind="train", step=3, target_version=9, written_at=1.0)


def rows(*samples: object, **named: object) -> list[SampleRow]:
    made = group(5, *samples, messages=named.pop("messages", ()))
    return list(rows_of(made, named.pop("place", TRAIN), TokenTexts(decode=decode), **named))


def branch(mask: list[int], versions: list[int]) -> Branch:
    count = len(mask)
    return Branch(
        tokens=np.arange(count, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=np.zeros(count, np.float32),
        weight_versions=np.array(versions, np.int32),
    )


def test_a_row_names_its_attempt_and_its_place_in_the_group() -> None:
    found = rows(sample("a"), sample("b", reward=None, finish_reason="length"))
    assert [(row.attempt_id, row.prompt_id, row.sample, row.samples) for row in found] == [
        (5, "train.jsonl:5", 0, 2),
        (5, "train.jsonl:5", 1, 2),
    ]
    assert [(row.reward, row.truncated) for row in found] == [(1.0, False), (None, True)]


def test_ages_are_counted_to_the_version_that_the_optimizer_steps_from() -> None:
    (row,) = rows(sample(versions=(6, 8)))
    assert (row.oldest_version, row.newest_version, row.age) == (6, 8, 3)
    assert row.ages() == [None, None, 3, 1]


def test_what_is_not_trained_has_no_age_and_no_advantage() -> None:
    (row,) = rows(sample(), place=Place(kind="train", step=3, filtered="all rewards are equal", written_at=1.0))
    assert (row.filtered, row.age, row.advantage, row.advantages) == ("all rewards are equal", None, None, None)


def test_every_token_has_its_text_and_its_advantage() -> None:
    (row,) = rows(sample(), advantages=[np.array([0, 0, 0.5, 1.5], np.float32)])
    assert row.token_texts == ["a", "b", "c", "d"]
    assert (row.advantages, row.advantage) == ([0, 0, 0.5, 1.5], 1.0)


def test_tokens_are_decoded_once() -> None:
    decoded: list[list[int]] = []

    def decode_one(tokens: Sequence[int]) -> str:
        decoded.append([*tokens])
        return "x"

    texts = TokenTexts(decode=decode_one)
    assert texts.of([4, 4, 7]) == ["x", "x", "x"]
    assert texts.of([7, 4]) == ["x", "x"]
    assert sorted(decoded) == [[4], [7]]


def test_the_reply_of_a_single_turn_follows_the_prompt_s_messages() -> None:
    (row,) = rows(sample("21"), messages=({"role": "user", "content": "rev 12"},))
    assert [message["content"] for message in json.loads(row.messages or "")] == ["rev 12", "21"]
    assert rows(sample())[0].messages is None


def test_a_conversation_and_metrics_become_columns_and_leave_the_metadata() -> None:
    known = {"messages": [{"role": "tool", "content": "3"}], "metrics": {"calls": 2.0}, "engines": ["engine-0"]}
    (row,) = rows(sample(metadata=known))
    assert json.loads(row.messages or "") == known["messages"]
    assert json.loads(row.reward_parts or "") == known["metrics"]
    assert json.loads(row.metadata) == {"engines": ["engine-0"]}


def test_metadata_that_json_does_not_know_is_written_as_python_shows_it() -> None:
    (row,) = rows(sample(metadata={"where": {"x"}, "odd": object}))
    assert json.loads(row.metadata)["odd"] == "<class 'object'>"


def test_an_example_without_a_response_gets_that_of_its_tokens() -> None:
    assert rows(sample(""))[0].response == "cd"


def test_a_sample_with_branches_has_a_row_for_each() -> None:
    first = sample()
    other = branch([0, 0, 1], [-1, 7, 8])
    found = rows(msgspec.structs.replace(first, more_branches=(other,)))
    assert [(row.branch, row.branches, len(row.tokens)) for row in found] == [(0, 2, 4), (1, 2, 3)]


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (TurnSpan(2, 4), SAMPLED),
        (TurnSpan(2, 4, elsewhere=True), OTHER_BRANCH),
        (TurnSpan(2, 4, constrained=True), FORCED),
    ],
)
def test_a_token_without_loss_has_the_reason(span: TurnSpan, reason: int) -> None:
    masked = branch([0, 0, 0, 1, 0], [NO_VERSION, NO_VERSION, NO_VERSION, 8, NO_VERSION])
    assert mask_reasons(masked, [span]).tolist() == [PROMPT, NOT_SAMPLED, reason, LOSS, NOT_SAMPLED]


def test_turns_are_as_generation_noted_them_with_their_times() -> None:
    spans = [[[2, 3, False, False, 10.0, 12.5], [3, 4, False, False, None, None]]]
    (row,) = rows(sample(metadata={"turn_spans": spans}))
    assert [(turn.start, turn.end, turn.started_at, turn.seconds) for turn in row.turns] == [
        (2, 3, 10.0, 2.5),
        (3, 4, None, None),
    ]


def test_without_a_note_turns_are_the_runs_of_sampled_tokens() -> None:
    found = rows(msgspec.structs.replace(sample(), more_branches=(branch([0, 1, 0, 1], [-1, 7, -1, 8]),)))
    assert [[(turn.start, turn.end) for turn in row.turns] for row in found] == [[(2, 4)], [(1, 2), (3, 4)]]
