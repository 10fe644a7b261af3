"""Token-in-token-out over random conversations, for templates in the styles of Qwen3, Llama 3 and GLM.

# covers: M14, R3
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miles_async.backends.megatron.packing.images import images_of
from miles_async.engines.sglang.api import engine_inputs
from miles_async.errors import TrajectoryError
from miles_async.trajectory import messages
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import canonical, with_kept_images
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.tree import Trajectory, _Request
from miles_async.types import NO_VERSION, Branch, GenerateRequest, JsonObject, Sample
from tests.fakes.chat_formats import TOOLS, chat_format
from tests.fakes.episodes import Episode, Say, anything, canonical_answers, follow_ups, questions, with_pictures
from tests.fakes.pictures import picture_processor

STYLES = ("qwen3", "llama3", "glm")
PLACEHOLDER = picture_processor(chat_format("qwen25_vl")).image_token
each_style = pytest.mark.parametrize("style", STYLES)


def rounds(answers: st.SearchStrategy[object]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.tuples(follow_ups(), answers), max_size=4)


tools = st.sampled_from([(), TOOLS])
options = st.sampled_from([{}, {"enable_thinking": False}])


@each_style
@settings(max_examples=30)
@given(data=st.data(), tools=tools, options=options)
def test_sampled_tokens_stay_and_the_rest_is_what_the_template_writes(
    style: str, data: st.DataObject, tools: Sequence[JsonObject], options: JsonObject
) -> None:
    """Whatever the model samples, however it ends: each sampled token is there, once, with its log-prob and version;
    all others are the template's text of the same conversation with something else said in each turn.
    """
    episode = Episode(style, tools, options)
    turns = [episode.turn(data.draw(questions()), data.draw(anything()))]
    for appended, say in data.draw(rounds(anything())):
        turns.append(episode.turn(appended, say))
    sample = episode.trajectory.sample()
    assert not sample.more_branches

    mask = sample.loss_mask.astype(bool)
    kept = [following.context.kept for following in turns[1:]] + [len(turns[-1].sampled.output_ids)]
    for name, array in (("output_ids", sample.tokens), ("logprobs", sample.rollout_logprobs)):
        said = [getattr(turn.sampled, name)[:count] for turn, count in zip(turns, kept, strict=True)]
        assert array[mask].tolist() == np.concatenate(said).tolist()
    versions = np.repeat(np.arange(1, len(turns) + 1), kept)
    assert sample.weight_versions[mask].tolist() == versions.tolist()
    assert (sample.weight_versions[~mask] == NO_VERSION).all()
    assert (sample.rollout_logprobs[~mask] == 0).all()
    for turn, count in zip(turns, kept, strict=True):  # what is left out is a stop token that the template replaces
        left_out = turn.sampled.output_ids[count:].tolist()
        assert not left_out or (len(left_out) == 1 and left_out[0] in episode.chat.stop_ids)

    assert as_text(episode, sample) == reference_text(episode, int(turns[-1].sampled.output_ids[-1]))


@settings(max_examples=60)
@given(data=st.data())
def test_images_stand_where_the_template_writes_them(data: st.DataObject) -> None:
    """In every branch, whatever the agent goes back to and whatever the model samples, a placeholder included."""
    episode = Episode("qwen25_vl")
    answers = anything() | st.just(Say(ids=(1, PLACEHOLDER), stop=None))
    turns: list[Turn] = []
    for number in range(data.draw(st.integers(1, 5))):
        parent = data.draw(st.sampled_from([None, *turns]))
        appended = [{"role": "user", "content": f"{number}"}, *data.draw(with_pictures() | follow_ups())]
        episode.messages = [] if parent is None else list(episode.histories[parent])
        turns.append(episode.turn(appended, data.draw(answers)))
        assert turns[-1].context.parent is parent
    sample = episode.trajectory.sample()
    for branch in sample.branches:
        found = images_of(branch.tokens, np.array([0, len(branch.tokens)]), [branch.pictures], episode.images)
        assert found == branch.pictures
    for turn in turns:
        request = GenerateRequest(
            input_ids=turn.context.input_ids(),
            sampling={},
            routing_key="",
            pictures=turn.context.pictures,
            image_token=PLACEHOLDER,
        )
        tokens, fields = engine_inputs(request)
        assert len(fields.get("image_data", ())) == (tokens == PLACEHOLDER).sum()
        history = [canonical(with_kept_images(m, episode.trajectory.keep_image)) for m in episode.histories[turn][:-1]]
        asked = [digest for message in history for digest in messages.images_of(message)]
        assert [each.digest for each in turn.context.pictures] == asked


def as_text(episode: Episode, sample: Sample) -> str:
    """The tokens of a sample as text, with § for what was sampled; a stop token that ends a turn is shown."""
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))
    text, position = "", 0
    for start, end in edges.reshape(-1, 2):
        text += episode.chat.decode_all(sample.tokens[position:start]) + "§"
        text += ending(episode, int(sample.tokens[end - 1]))
        position = end
    return without_think_blocks(text + episode.chat.decode_all(sample.tokens[position:]))


def reference_text(episode: Episode, last_token: int) -> str:
    """What the template writes, with § for each turn; the last one ends as it was sampled."""
    *history, _ = (canonical(message) for message in episode.messages)
    masked = [{"role": "assistant", "content": "§"} if m["role"] == "assistant" else m for m in history]
    text = episode.chat.render(masked, episode.tools, episode.options, generation_prompt=True) + "§"
    return without_think_blocks(text + ending(episode, last_token))


def ending(episode: Episode, last_token: int) -> str:
    return episode.chat.decode_all([last_token]) if last_token in episode.chat.stop_ids else ""


def without_think_blocks(text: str) -> str:
    """Templates open turns that are past and the one to come differently."""
    for block in ("<think>\n\n</think>\n\n", "\n<think></think>\n", "\n<think></think>"):
        text = text.replace(block + "§", "§")
    return text


@each_style
@settings(max_examples=30)
@given(data=st.data(), tools=tools)
def test_a_model_that_writes_as_the_template_does_gives_the_templates_own_tokens(
    style: str, data: st.DataObject, tools: Sequence[JsonObject]
) -> None:
    """Then tokens in, tokens out is the same as rendering and tokenizing the whole conversation."""
    episode = Episode(style, tools)
    answers = canonical_answers(calls=1 if style == "llama3" else 3) if tools else canonical_answers(calls=0)
    appended = data.draw(questions())
    for following, _ in [*data.draw(rounds(st.none())), ([], None)]:
        say = data.draw(answers)
        if style == "glm":  # it stops by opening the next message
            kinds = [message["role"] for message in following[:1]]
            say = replace(say, stop=2 if kinds == ["tool"] else 1)
            if kinds == ["system"]:
                return
        turn = episode.turn(appended, say)
        assert turn.context.parent is (None if len(episode.trajectory.turns) == 1 else episode.trajectory.turns[-2])
        appended = following
    sample = episode.trajectory.sample()
    assert not sample.more_branches
    *history, _ = (canonical(message) for message in episode.messages)
    prompt = episode.chat.render(history, tools, {}, generation_prompt=True)
    assert sample.tokens.tolist() == [*episode.chat.tokenize(prompt), *turn.sampled.output_ids.tolist()]


@each_style
@settings(max_examples=30)
@given(data=st.data())
def test_an_agent_that_goes_back_forks_and_each_sampled_token_carries_loss_once(
    style: str, data: st.DataObject
) -> None:
    """Back to any turn before, or to a new beginning."""
    episode = Episode(style)
    turns: list[Turn] = []
    for number, (appended, say) in enumerate([(None, data.draw(anything())), *data.draw(rounds(anything()))]):
        parent = data.draw(st.sampled_from([None, *turns]))
        messages = data.draw(questions()) if parent is None or appended is None else appended
        messages[0]["content"] = f"{number}: {messages[0]['content']}"  # no two requests are the same
        episode.messages = [] if parent is None else list(episode.histories[parent])
        turns.append(episode.turn(messages, say))
        assert turns[-1].context.parent is parent
    sample = episode.trajectory.sample()

    parents = {turn.context.parent for turn in turns}
    leaves = [turn for turn in turns if turn not in parents]
    assert len(sample.more_branches) in (len(leaves) - 1, sum(len(t.sampled.output_ids) > 0 for t in leaves) - 1)
    carrying = np.concatenate([branch.weight_versions[branch.loss_mask == 1] for branch in sample.branches]).tolist()
    for number, turn in enumerate(turns, start=1):  # which is its version, too
        said = len(turn.sampled.output_ids)
        assert carrying.count(number) in ({said, said - 1} if turn in parents else {said})
    for branch in sample.branches:
        assert ((branch.weight_versions != NO_VERSION) == (branch.loss_mask == 1)).all()
        assert_experts_of_first_readers(branch, turns)
    assert sample.text == episode.chat.decode(turns[-1].sampled.output_ids)


def assert_experts_of_first_readers(branch: Branch, turns: list[Turn]) -> None:
    """Each token but the last has the experts of the first turn that read it behind the same tokens."""
    # covers: M19
    read = [[*turn.context.input_ids().tolist(), *turn.sampled.output_ids.tolist()][:-1] for turn in turns]
    tokens = branch.tokens.tolist()
    on_path = [tokens[: turn.context.length] == turn.context.input_ids().tolist() for turn in turns]
    assert branch.routed_experts[:, 0].tolist() == [*tokens[:-1], 0]
    for position, number in enumerate(branch.routed_experts[:-1, 1].tolist()):
        readers = (
            n
            for n, (ids, known) in enumerate(zip(read, on_path, strict=True), start=1)
            if known and ids[: position + 1] == tokens[: position + 1]
        )
        assert number == next(readers)


@each_style
@settings(max_examples=30)
@given(data=st.data(), tools=tools, options=options)
def test_a_history_as_the_template_writes_it_is_what_it_makes_of_the_replies(
    style: str, data: st.DataObject, tools: Sequence[JsonObject], options: JsonObject
) -> None:
    """Whatever the model samples, and though the agent forgets the reasoning; each sampled token carries loss once."""
    episode = Episode(style, tools, options, as_template_writes=True)
    replies: list[JsonObject] = []
    rounds_of = [(data.draw(questions()), data.draw(anything())), *data.draw(rounds(anything()))]
    for appended, say in rounds_of:
        turn = episode.turn(appended, say)
        episode.messages[-1].pop("reasoning_content", None)
        history = [canonical(message) for message in episode.messages[:-1]]
        spoken = iter(replies)
        history = [next(spoken) if message["role"] == "assistant" else message for message in history]
        written = episode.chat.render(history, tools, options, generation_prompt=True)
        assert episode.chat.decode_all(turn.context.input_ids()) == written
        replies.append(turn.reply)
    sample = episode.trajectory.sample()
    turns = episode.trajectory.turns
    carrying = np.concatenate([branch.weight_versions[branch.loss_mask == 1] for branch in sample.branches]).tolist()
    for number, turn in enumerate(turns, start=1):
        said = len(turn.sampled.output_ids)
        assert carrying.count(number) in (said, said - 1)


# -------------------------------------------------------------------------------------- what is remembered of requests
def context_of(trajectory: Trajectory, episode: Episode, messages: Sequence[JsonObject]) -> object:
    """What a trajectory makes of a request; None if it refuses it."""
    try:
        context = trajectory.extend(messages, episode.tools, episode.options)
    except TrajectoryError:
        return None
    ids = context.input_ids().tolist()
    assert trajectory.input_ids(context).tolist() == ids
    return context.parent, context.kept, context.text, context.prompt_length, ids


def edited(data: st.DataObject, episode: Episode) -> list[JsonObject]:
    """A history as an agent might send it: mostly what it was, or changed by one character, cut, or an earlier one."""
    history = json.loads(json.dumps(episode.messages))  # other objects each time, as a server reads them
    kind = data.draw(st.sampled_from(["kept"] * 8 + ["character", "left out", "cut", "earlier"]))
    if not history or kind == "kept":
        return history
    at = data.draw(st.integers(0, len(history) - 1))
    if kind == "character":
        content = history[at]["content"] or ""
        place = data.draw(st.integers(0, len(content)))
        history[at]["content"] = content[:place] + "x" + content[place + 1 :]
    elif kind == "left out":
        del history[at]
    elif kind == "cut":
        del history[at:]
    else:
        history = list(data.draw(st.sampled_from([*episode.histories.values()])))
    return history


def check_that_remembering_changes_nothing(style: str, data: st.DataObject) -> None:
    """Each request has the context that it has in a trajectory of the same turns that remembers no other request and
    renders the whole conversation.
    """
    episode = Episode(style, TOOLS)
    renderer = Renderer(episode.chat)
    renderer.abridges = False
    for _ in range(data.draw(st.integers(4, 12))):
        history = edited(data, episode)
        appended = data.draw(follow_ups() if history else questions())
        reference = Trajectory(renderer, episode.trajectory.parser, turns=list(episode.trajectory.turns))
        expected = context_of(reference, episode, [*history, *appended])
        assert context_of(episode.trajectory, episode, [*history, *appended]) == expected
        if expected is not None:
            episode.messages = history
            episode.turn(appended, data.draw(anything()))
    assert episode.trajectory.renderer.abridges
    episode.trajectory.sample()


@each_style
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_remembered_of_the_request_before_changes_nothing(style: str, data: st.DataObject) -> None:
    check_that_remembering_changes_nothing(style, data)


@pytest.mark.parametrize("compared", [slice(0, 0), slice(-1, None), slice(None, -1)], ids=["none", "last", "first"])
def test_a_message_before_that_is_not_compared_is_noticed(compared: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above fails where only some of the earlier messages are compared."""

    def begins(self: _Request, messages: Sequence[object]) -> bool:
        known = len(self.messages)
        return 0 < known <= len(messages) and messages[:known][compared] == self.messages[compared]

    monkeypatch.setattr(_Request, "begins", begins)
    reproducible = settings(
        max_examples=300,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        reproducible(given(data=st.data())(lambda data: check_that_remembering_changes_nothing("qwen3", data)))()
