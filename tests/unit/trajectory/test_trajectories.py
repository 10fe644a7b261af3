"""Trajectories, case by case: what forks, what is refused with which words, what a sample holds.

# covers: M14
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from miles_async.errors import RequestRejectedError, TrajectoryError, TransientEngineError
from miles_async.prompts.templates import ChatTemplate
from miles_async.trajectory import tree
from miles_async.trajectory.messages import canonical, is_echo
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.tree import Trajectory
from miles_async.types import JsonObject, TurnSpan
from tests.fakes.chat_formats import TOOLS, chat_format, chat_template
from tests.fakes.episodes import Episode, Say
from tests.fakes.reply_parsers import parse_glm, parse_llama3, parse_qwen, split_think


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def result(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content, "tool_call_id": "call00000"}


def episode_with(template: str, stop_texts: Sequence[str] = ()) -> Episode:
    """An episode with a chat template whose turns end with <|im_end|> or one of the texts."""
    episode = Episode("qwen3", TOOLS)
    episode.chat = chat = chat_template(template, ("<|im_end|>",), "<s>")
    chat.stop_texts = stop_texts
    episode.trajectory = Trajectory(Renderer(chat), replace(episode.trajectory.parser, chat=chat))
    return episode


# ------------------------------------------------------------------------------------------------------ tokens
def test_a_turn_that_was_cut_is_closed_by_the_template() -> None:
    episode = Episode("qwen3")
    turns = [episode.turn([user("a")], Say(text="b", stop=None)), episode.turn([user("c")], Say(text="d"))]
    sample = episode.sample()
    assert episode.chat.decode_all(sample.tokens) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    )
    said = [len(turn.sampled.output_ids) for turn in turns]
    assert said == [1, 2]
    assert sample.loss_mask.sum() == 3


def test_a_stop_token_that_opens_the_wrong_message_is_replaced_where_the_turn_goes_on() -> None:
    """GLM ends a turn with <|user|> or <|observation|>; whoever answers decides which it is."""
    episode = Episode("glm", TOOLS)
    first = episode.turn([user("a")], Say(calls=(("search", "b"),), stop=1))
    assert episode.chat.decode_all(first.sampled.output_ids[-1:]) == "<|user|>"
    second = episode.turn([result("c")], Say(text="d", stop=1))
    sample = episode.sample()
    assert "</tool_call><|observation|>\n<tool_response>" in episode.chat.decode_all(sample.tokens)
    assert sample.loss_mask.sum() == len(first.sampled.output_ids) - 1 + len(second.sampled.output_ids)


ENDS_WITH_WORDS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% if m.role == "assistant" %}### End
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.mark.parametrize("said", ["b\n### End", "b\n### End\n", "b"])
def test_a_stop_of_several_tokens_ends_a_turn_once(said: str) -> None:
    """``--rollout-stop``, as a note at startup recommends it for such a template."""
    episode = episode_with(ENDS_WITH_WORDS, stop_texts=("### End",))
    episode.turn([user("a")], Say(text=said, stop=None))
    turn = episode.turn([user("c")], Say(text="d"))
    assert episode.chat.decode_all(turn.context.input_ids().tolist()) == (
        "user: a\nassistant: b\n### End\nuser: c\nassistant: "
    )


def test_reasoning_of_earlier_turns_stays_in_the_tokens_though_the_template_would_drop_it() -> None:
    episode = Episode("qwen3")
    episode.turn([user("a")], Say(text="<think>\nhm\n</think>\n\nb"))
    assert episode.messages[-1]["reasoning_content"] == "hm"
    del episode.messages[-1]["reasoning_content"]  # as most agents do
    turn = episode.turn([user("c")], Say(text="d"))
    assert turn.context.parent is episode.trajectory.turns[0]
    assert "hm" in episode.chat.decode_all(turn.context.input_ids())


def test_a_history_as_the_template_writes_it_branches_where_earlier_reasoning_is_left_out() -> None:
    episode = Episode("qwen3", TOOLS, as_template_writes=True)
    turns = []
    for appended, text in [
        (
            user("a"),
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
        ),
        (result("found"), "<think>\nso\n</think>\n\nb"),  # same question: the template keeps the reasoning
        (user("c"), "<think>\nwell\n</think>\n\nd"),  # another: it leaves all reasoning out
        (user("e"), "f"),
    ]:
        turns.append(episode.turn([appended], Say(text=text)))
        episode.messages[-1].pop("reasoning_content", None)  # as most agents do
    assert [turn.context.parent for turn in turns] == [None, turns[0], None, None]
    asked = [episode.chat.decode_all(turn.context.input_ids()) for turn in turns]
    assert "hm" in asked[1]
    assert not any(word in asked[2] for word in ("hm", "so", "think"))
    assert "well" not in asked[3]
    sample = episode.sample()
    assert len(sample.branches) == 3
    said = sum(len(turn.sampled.output_ids) for turn in turns)
    assert sum(int(branch.loss_mask.sum()) for branch in sample.branches) == said


def test_a_history_as_the_template_writes_it_keeps_the_tokens_where_their_text_is_the_same() -> None:
    episode = Episode("llama3", as_template_writes=True)
    first = episode.turn([user("a")], Say(ids=tuple(episode.chat.tokenize("qui") + episode.chat.tokenize("ck"))))
    second = episode.turn([user("c")], Say(text="d"))
    assert second.context.parent is first


def test_a_history_as_the_template_writes_it_follows_a_template_that_changes_its_mind() -> None:
    episode = Episode("wandering", TOOLS[:1], as_template_writes=True)
    episode.turn([user("first")], Say(text="b"))
    turn = episode.turn([user("second")], Say(text="d"))
    assert turn.context.parent is None


def test_tool_calls_stay_where_a_template_wants_them_for_their_results() -> None:
    episode = Episode("mistral", TOOLS)
    first = episode.turn([user("a")], Say(text="x"))
    calls = [{"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"query": "b"}}}]
    first.reply["tool_calls"] = calls  # as a parser would have it
    episode.messages[-1]["tool_calls"] = calls
    turn = episode.turn([result("c")], Say(text="d"))
    assert turn.context.parent is first
    assert episode.chat.decode_all(turn.context.appended) == "[TOOL_RESULTS]call00000 c[/TOOL_RESULTS]"


RESULTS = (
    """{% for other in messages if other.tool_call_id == call.id %}{{ call.id }} = {{ other.content }}{% endfor %}"""
)
RESULTS_WITH_CALLS = (
    """{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% for call in m.tool_calls or [] %}"""
    + RESULTS
    + """{% endfor %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)


def test_tool_calls_stay_where_a_template_writes_results_with_them() -> None:
    """As Gemma 4's does: without the calls it leaves the results out."""
    episode = episode_with(RESULTS_WITH_CALLS)
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    first = episode.turn([user("a")], Say(text=call + call))
    ids = [each["id"] for each in first.reply["tool_calls"]]
    assert len(ids) == 2
    results = [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ids]
    turn = episode.turn(results, Say(text="d"))
    expected = "".join(f"{each} = of {each}" for each in ids)
    assert episode.chat.decode_all(turn.context.appended) == f"\n{expected}<|im_start|>assistant\n"


def test_a_template_that_leaves_results_of_tools_out_is_refused() -> None:
    episode = episode_with(RESULTS_WITH_CALLS.replace(RESULTS, ""))
    episode.turn([user("a")], Say(text="b"))
    with pytest.raises(TrajectoryError, match="leaves out messages of the role 'tool'"):
        episode.turn([result("c")], Say(text="d"))


# ---------------------------------------------------------------------------------------- what turns cost, and why
def test_a_turn_renders_and_reads_as_much_after_100_turns_as_after_3(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = Episode("qwen3")
    work = []
    for module, name, amount in [(ChatTemplate, "render", len), (tree, "canonical", lambda message: 1)]:
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, amount: Any = amount, **options: Any) -> Any:
            work[-1] += amount(args[1] if len(args) > 1 else args[0])
            return original(*args, **options)

        monkeypatch.setattr(module, name, counted)
    for number in range(100):
        work.append(0)
        episode.turn([user(f"question {number}")], Say(text="a"))
    whole = {0, 1, 2, 4, 8, 16, 32, 64}
    assert {work[n] for n in range(3, 100) if n not in whole} == {5 + 2}  # 5 messages rendered, 2 read
    assert sum(work) < 15 * 100
    sample = episode.sample()
    messages = [canonical(message) for message in episode.messages[:-1]]
    written = episode.chat.render(messages, (), {}, generation_prompt=True)
    assert episode.chat.decode_all(sample.tokens).startswith(written)


class LooksBack:
    """A chat format whose template writes, ``at`` the end or in front of each message, how many messages there are."""

    def __init__(self, at: str) -> None:
        self._chat, self._at = chat_format("qwen3"), at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        options: JsonObject,
        *,
        generation_prompt: bool,
    ) -> str:
        if self._at == "message":
            messages = [{**m, "content": f"{n}: {m['content']}"} for n, m in enumerate(messages)]
        text = self._chat.render(messages, tools, options, generation_prompt=generation_prompt)
        return f"{text}{len(messages)}:" if self._at == "end" else text


def looking_back(at: str, turns: int) -> tuple[Episode, list[str]]:
    """An episode, and what the template writes of the conversation up to each turn."""
    episode = Episode("qwen3")
    episode.trajectory.renderer = Renderer(LooksBack(at))
    return episode, [talk(episode, number) for number in range(turns)]


def talk(episode: Episode, number: int) -> str:
    turn = episode.turn([user(f"question {number}")], Say(text="a"))
    return episode.chat.decode_all(turn.context.appended)


OPENS_REASONING = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and not m.reasoning_content %}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""


def test_past_turns_may_be_opened_otherwise_than_the_next_one() -> None:
    """As templates of GLM-4.7 and MiniMax-M2 do, whose next turn begins with reasoning."""
    episode = episode_with(OPENS_REASONING)
    assert episode.trajectory.renderer.opening({}) == "<|im_start|>assistant\n<think>"
    call = 'hm</think><tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    new = [user("a")]
    for _ in range(3):
        turn = episode.turn(new, Say(text=call))
        new = [result("y")]
    assert turn.reply["tool_calls"]
    sample = episode.sample()
    assert not sample.more_branches
    asked = "<|im_start|>assistant\n<think>"
    assert episode.chat.decode_all(sample.tokens.tolist()) == (
        f"<|im_start|>user\na<|im_end|>\n{asked}{call}<|im_end|>\n"
        + 2 * f"<|im_start|>tool\ny<|im_end|>\n{asked}{call}<|im_end|>\n"
    ).removesuffix("\n")


def test_a_template_that_numbers_messages_is_rendered_as_a_whole() -> None:
    episode, appended = looking_back("message", 7)
    assert [f"{2 * n}: question {n}" in text for n, text in enumerate(appended)] == [True] * 7
    assert episode.trajectory.sample() is not None


@pytest.mark.parametrize("turns", [4, 7])
def test_an_episode_is_repeated_if_the_template_looked_at_turns_that_were_not_rendered(turns: int) -> None:
    episode, appended = looking_back("end", turns)
    assert [text.endswith(f"{2 * n + 1}:") for n, text in enumerate(appended)][:5] == [True, True, True, False, True][
        :turns
    ]
    with pytest.raises(TransientEngineError, match="has to be repeated"):
        episode.trajectory.sample()
    renderer = episode.trajectory.renderer
    episode = Episode("qwen3")
    episode.trajectory.renderer = renderer
    assert [talk(episode, n).endswith(f"{2 * n + 1}:") for n in range(turns)] == [True] * turns
    assert episode.trajectory.sample() is not None


# -------------------------------------------------------------------------------------------------- mismatches
def test_a_template_that_changes_what_is_in_the_tokens_is_an_error_with_the_difference() -> None:
    episode = Episode("wandering", TOOLS[:1])
    episode.turn([user("first")], Say(text="b"))
    with pytest.raises(TrajectoryError) as caught:
        episode.turn([user("second")], Say(text="d"))
    message = str(caught.value)
    assert "renders earlier messages differently now" in message
    assert "expected ...'<s>[AVAILABLE_TOOLS]" in message
    assert "found    ...'<s>[INST]first" in message


def test_a_conversation_that_the_template_refuses_is_an_error_with_its_words() -> None:
    episode = Episode("llama3", TOOLS)
    call = {"type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages = [user("a"), {"role": "assistant", "tool_calls": [call, call]}, result("b")]
    with pytest.raises(TrajectoryError, match="one tool call at a time"):
        episode.trajectory.extend(messages, TOOLS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "end before a turn of the assistant"),
        ([user("a"), {"role": "assistant", "content": "b"}], "end before a turn of the assistant"),
        ([{"role": "robot", "content": "b"}], "found {'role': 'robot'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "parts of type text"),
        ([user("a"), {"role": "assistant", "tool_calls": [{"function": {}}]}, user("b")], "tool call with a function"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(messages: list, words: str) -> None:
    with pytest.raises(TrajectoryError, match=words):
        Episode("qwen3").trajectory.extend(messages)


def test_a_refusal_is_the_requests_own_fault() -> None:
    """So it costs its attempt, and is not tried again."""
    assert issubclass(TrajectoryError, RequestRejectedError)


# ------------------------------------------------------------------------------------------------------- forks
def test_edited_history_forks_at_the_last_turn_that_was_left_alone() -> None:
    episode = Episode("qwen3")
    first = episode.turn([user("a")], Say(text="b"))
    second = episode.turn([user("c")], Say(text="d"))
    episode.messages[-1] = {"role": "assistant", "content": "edited"}
    third = episode.turn([user("e")], Say(text="f"))
    assert (second.context.parent, third.context.parent) == (first, first)
    assert [message["content"] for message in third.context.messages] == ["c", "edited", "e"]
    sample = episode.sample()
    longest, other = sample.branches
    assert longest.loss_mask.sum() == 4
    assert other.loss_mask.sum() == 2  # "f" and its end: what was said before is counted with the first
    assert "edited" in episode.chat.decode_all(other.tokens)
    assert sample.metadata["turns"] == 3
    assert sample.text == "f"  # the end of the episode, on whichever branch
    # Where the turns are, and which of them carry loss elsewhere.
    spans = [[TurnSpan(*span) for span in of_branch] for of_branch in sample.metadata["turn_spans"]]
    assert [[span.elsewhere for span in of_branch] for of_branch in spans] == [[False, False], [True, False]]
    for branch, of_branch, turns in zip(sample.branches, spans, [(first, second), (first, third)], strict=True):
        sampled = [branch.tokens[span.start : span.end].tolist() for span in of_branch]
        assert sampled == [turn.sampled.output_ids.tolist() for turn in turns]


def test_a_branch_without_a_sampled_token_of_its_own_is_none() -> None:
    """There would be nothing to train on, and no version."""
    episode = Episode("qwen3")
    episode.turn([user("a")], Say(text="b"))
    history = list(episode.messages)
    episode.turn([user("c")], Say(text="d"))
    episode.messages = history
    nothing = episode.turn([user("e")], Say(text="", stop=None))
    assert len(nothing.sampled.output_ids) == 0
    sample = episode.sample()
    assert len(sample.branches) == 1
    assert sample.text == ""


def test_truncated_history_begins_another_branch() -> None:
    episode = Episode("qwen3")
    episode.turn([user("a")], Say(text="b"))
    episode.turn([user("c")], Say(text="d"))
    episode.messages = episode.messages[2:]  # the first question and its answer forgotten
    turn = episode.turn([user("e")], Say(text="f"))
    assert turn.context.parent is None
    assert turn.context.prompt_length == turn.context.length
    sample = episode.sample()
    assert len(sample.branches) == 2


def test_the_answer_to_the_request_before_does_not_hide_a_deeper_turn() -> None:
    episode = Episode("qwen3")
    episode.turn([user("a")], Say(text="b"))
    second = episode.turn([user("c")], Say(text="d"))
    history, episode.messages = episode.messages, []
    again = episode.turn([user("a")], Say(text="b"))
    assert again.context.parent is None
    episode.messages = history
    assert episode.turn([user("e")], Say(text="f")).context.parent is second


def test_other_tools_begin_another_branch() -> None:
    episode = Episode("qwen3", TOOLS)
    episode.turn([user("a")], Say(text="b"))
    episode.tools = TOOLS[:1]
    assert episode.turn([user("c")], Say(text="d")).context.parent is None


def test_an_echo_may_lack_reasoning_and_outer_white_space_and_nothing_else() -> None:
    reply = canonical({"role": "assistant", "content": " b\n", "reasoning_content": "hm"})
    assert is_echo(canonical({"role": "assistant", "content": "b"}), reply)
    assert is_echo(canonical({"role": "assistant", "content": "b", "reasoning_content": "hm", "refusal": None}), reply)
    assert not is_echo(canonical({"role": "assistant", "content": "b", "reasoning_content": "other"}), reply)
    assert not is_echo(canonical({"role": "assistant", "content": "B"}), reply)


# ----------------------------------------------------------------------------------------------------- replies
def test_tool_calls_of_each_family_are_read() -> None:
    assert parse_qwen(
        'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>', ()
    ) == (
        "Let me see.",
        [("search", {"query": "x"})],
    )
    assert parse_llama3('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"c": 1}}', ()) == (
        "",
        [("a", {}), ("b", {"c": 1})],
    )
    text = (
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>limit</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    )
    assert parse_glm(text, TOOLS) == ("", [("search", {"query": "12", "limit": 12})])  # as declared


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_qwen, "<tool_call>\n{not json}\n</tool_call>"),
        (parse_qwen, '<tool_call>\n["search"]\n</tool_call>'),
        (parse_llama3, '{"name": "a"} and more'),
        (parse_llama3, '{"answer": 3}'),
        (parse_glm, "<tool_call>search"),
    ],
)
def test_text_that_is_not_a_call_stays_text(parse, text: str) -> None:
    assert parse(text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("hm, and cut", True, ("hm, and cut", "")),
        ("yes", False, (None, "yes")),
    ],
)
def test_reasoning_is_split_off(text: str, begun: bool, expected: tuple) -> None:
    assert split_think(text, "<think>\n" if begun else "") == expected
