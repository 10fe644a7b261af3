"""The same conversation through every protocol gives the same token tree.

# covers: M13, M14, R3
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.trajectory.context import Turn
from miles_async.types import JsonObject
from tests.fakes.chat_formats import TOOLS
from tests.fakes.episodes import (
    Episode,
    Say,
    anything,
    canonical_answers,
    follow_ups,
    questions,
    texts,
    with_pictures,
)
from tests.fakes.protocol_clients import CLIENTS

each_style = pytest.mark.parametrize("style", ["qwen3", "llama3", "glm"])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3),
    max_leaves=6,
)


def calls_with(style: str) -> st.SearchStrategy[Say]:
    """Calls whose arguments are any JSON, text that is almost a call, and reasoning in front of them."""
    names = st.sampled_from(["search", "open_page", "unknown"])
    calls = st.tuples(names, json_values.map(json.dumps) | texts).map(lambda call: written(style, *call))
    thoughts = st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>\n", "Let me see.\n"])
    return st.tuples(thoughts, calls).map(lambda parts: Say(text="".join(parts) or "x"))


def written(style: str, name: str, arguments: str) -> str:
    if style == "llama3":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    if style == "glm":
        return f"<tool_call>{name}\n<arg_key>query</arg_key>\n<arg_value>{arguments}</arg_value>\n</tool_call>"
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@each_style
@settings(max_examples=25)
@given(data=st.data(), tools=st.sampled_from([(), TOOLS]))
def test_every_protocol_gives_the_same_samples(style: str, data: st.DataObject, tools: Sequence[JsonObject]) -> None:
    answers = anything() | canonical_answers(calls=1 if tools else 0) | calls_with(style)
    rounds = [(data.draw(questions()), data.draw(answers))]
    rounds += data.draw(st.lists(st.tuples(follow_ups(), answers), max_size=3))
    pieces = data.draw(st.lists(st.integers(1, 9), max_size=40))
    samples = {name: [*tree(style, tools, name, rounds)] for name in CLIENTS}
    samples |= {f"{name}, streamed": [*tree(style, tools, name, rounds, pieces)] for name in CLIENTS}
    expected = samples["chat completions"]
    assert len(expected) == 1  # no branch: each protocol gives back what it was given
    for name, found in samples.items():
        assert found == expected, name


@settings(max_examples=25)
@given(data=st.data())
def test_every_protocol_gives_the_same_samples_of_images(data: st.DataObject) -> None:
    rounds = data.draw(st.lists(st.tuples(with_pictures(), anything()), min_size=1, max_size=3))
    expected, *others = [[*tree("qwen25_vl", (), name, rounds)] for name in CLIENTS]
    assert len(expected) == 1
    assert others == [expected] * len(others)


def tree(
    style: str,
    tools: Sequence[JsonObject],
    protocol: str,
    rounds: Sequence[tuple[Sequence[JsonObject], Say]],
    pieces: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Branches that a client makes of a conversation. ``pieces``: it has its answers streamed, by so many tokens."""
    episode, client = Episode(style, tools), CLIENTS[protocol](tools, streams=pieces is not None)
    turns: list[Turn] = []
    for appended, say in rounds:
        exchange = client.exchange(appended, episode.trajectory.keep_image)
        request = exchange.turn
        context = episode.trajectory.extend(request.messages, request.tools, request.options)
        generation = episode.sampled(context, episode.output_ids(say, appended))
        turns.append(client.take(episode.trajectory, exchange, generation, pieces or ()))
    sample = episode.trajectory.sample()
    kept = [turn.context.kept for turn in turns[1:]] + [len(turns[-1].sampled.output_ids)]
    said = [turn.sampled.output_ids[:count] for turn, count in zip(turns, kept, strict=True)]
    assert sample.tokens[sample.loss_mask == 1].tolist() == np.concatenate(said).tolist()
    for branch in sample.branches:
        yield {
            "tokens": branch.tokens.tolist(),
            "mask": branch.loss_mask.tolist(),
            "logprobs": branch.rollout_logprobs.tolist(),
            "versions": branch.weight_versions.tolist(),
            "pictures": branch.pictures,
        }
