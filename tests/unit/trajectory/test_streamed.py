"""What is shown of a turn while it is sampled: only what the whole reply begins with."""

from __future__ import annotations

import pytest

from miles_async.errors import EngineError, TransientEngineError
from miles_async.trajectory.messages import Message
from miles_async.trajectory.replies import extends
from miles_async.trajectory.streamed import StreamedTurn
from tests.fakes.chat_formats import TOOLS
from tests.fakes.session_agents import CALL, CHAT, PARSER, QUESTION, make_trajectory
from tests.property.builders import make_generation

PROMPT = "<|im_start|>assistant\n"


def certain(text: str, *, before: str = PROMPT, tools: bool = True, stops: tuple[str, ...] = ()) -> Message:
    return PARSER.certain(text, before, TOOLS if tools else (), stops=stops)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Let me see", "Let me see"),
        ("Let me see. ", "Let me see."),  # white space in front of a call is dropped
        ("Let me see.\n<tool", "Let me see."),
        (f"Let me see.\n{CALL}\nand", "Let me see."),
        (" Let me see", ""),  # so it is at the beginning
        ("<thi", ""),
        ("1 < 2", "1 < 2"),
        ("Done<|im_e", "Done"),
    ],
)
def test_what_may_become_a_call_or_an_end_is_held_back(text: str, content: str) -> None:
    assert certain(text) == {"role": "assistant", "content": content}


def test_without_tools_nothing_is_a_call() -> None:
    assert certain(" 1 <tool_call> 2", tools=False)["content"] == " 1 <tool_call> 2"


def test_a_stop_is_held_back_and_so_is_what_comes_after_it() -> None:
    assert [certain(text, stops=("###",))["content"] for text in ("a #", "a #b", "a ###b")] == ["a", "a #b", "a"]


def test_reasoning_grows_and_is_whole_when_content_begins() -> None:
    texts = [
        "<think>",
        "<think>\nhm ",
        "<think>\nhm so</thi",
        "<think>\nhm so </think>",
        "<think>\nhm so </think>\n\n6",
    ]
    replies = [certain(text) for text in texts]
    assert [reply.get("reasoning_content") for reply in replies] == [None, "hm", "hm so", "hm so", "hm so "]
    assert [reply["content"] for reply in replies] == ["", "", "", "", "6"]


def test_a_template_may_have_begun_the_reasoning() -> None:
    assert certain("hm", before=f"{PROMPT}<think>\n") == {"role": "assistant", "content": "", "reasoning_content": "hm"}


# -------------------------------------------------------------------------------------------------- a turn
def streamed() -> StreamedTurn:
    turn = StreamedTurn(lambda: None)
    turn.begin(PARSER, make_trajectory().extend([QUESTION]), stops=(), parallel_calls=True)
    return turn


def content(turn: StreamedTurn) -> str | None:
    reply = turn.advance()
    return None if reply is None else reply["content"]


def test_tokens_become_text_as_they_are_told() -> None:
    turn, ids = streamed(), CHAT.tokenize("It is 68.")
    assert content(turn) is None
    turn(0, ids[:-1])
    first = content(turn)
    assert first
    assert content(turn) is None
    turn(len(ids) - 1, ids[-1:])
    assert content(turn) == "It is 68."
    assert "It is 68.".startswith(first)


def test_nothing_is_shown_of_a_turn_that_is_over() -> None:
    turn = streamed()
    turn(0, CHAT.tokenize("a b"))
    assert turn.end()["content"] == ""
    assert turn.advance() is None


def test_tokens_that_nobody_was_shown_may_be_thrown_away() -> None:
    turn = streamed()
    turn(0, CHAT.tokenize("It is 67."))
    turn(0, ())
    turn(0, CHAT.tokenize("It is 68."))
    assert content(turn) == "It is 68."


def test_tokens_that_were_shown_may_not() -> None:
    turn = streamed()
    turn(0, CHAT.tokenize("It is 67."))
    assert content(turn) == "It is 67."
    with pytest.raises(TransientEngineError, match="threw away"):
        turn(0, ())


def test_what_a_call_returns_must_begin_with_what_was_shown() -> None:
    turn, ids = streamed(), CHAT.tokenize("It is 68.")
    turn(0, ids[:3])
    assert content(turn)
    turn(0, ids)
    assert content(turn) == "It is 68."
    with pytest.raises(TransientEngineError, match="threw away"):
        turn(0, CHAT.tokenize("No."))


def test_an_earlier_chunk_stays_when_the_next_one_begins_again() -> None:
    turn, kept = streamed(), CHAT.tokenize("It is ")
    turn(0, kept)
    assert content(turn) == "It is"
    turn(len(kept), CHAT.tokenize("67"))
    turn(len(kept), ())
    turn(len(kept), CHAT.tokenize("68"))
    assert content(turn) == "It is 68"


# ---------------------------------------------------------------------------------------------- the reply
def test_text_that_was_shown_as_content_stays_content() -> None:
    shown = {"role": "assistant", "content": "Hello"}
    assert PARSER.reply("Hello, you", PROMPT, (), "c", shown=shown)["content"] == "Hello, you"
    late = PARSER.reply("\n\n<think>a</think>b", PROMPT, (), "c", shown={"role": "assistant", "content": "\n\n<"})
    assert late == {"role": "assistant", "content": "\n\n<think>a</think>b"}


def test_a_turn_that_does_not_continue_what_was_shown_is_not_kept() -> None:
    trajectory = make_trajectory()
    context = trajectory.extend([QUESTION])
    sampled = make_generation(CHAT.tokenize("It is 68."), engines=("engine-0",))
    with pytest.raises(EngineError, match=r"It is 6[.].* was streamed, but the whole answer is .*It is 68"):
        trajectory.add(context, sampled, shown={"role": "assistant", "content": "It is 6."})
    assert trajectory.turns == []
    assert trajectory.add(context, sampled, shown={"role": "assistant", "content": "It is 6"}).text == "It is 68."


def test_replies_are_compared_from_their_beginning() -> None:
    message = {"role": "assistant", "content": "a b", "reasoning_content": "hm so"}
    assert extends(message, {"role": "assistant", "content": "", "reasoning_content": "hm"})
    assert extends(message, {"role": "assistant", "content": "a", "reasoning_content": "hm so"})
    assert not extends(message, {"role": "assistant", "content": "a", "reasoning_content": "hm"})
    assert not extends(message, {"role": "assistant", "content": "b", "reasoning_content": "hm so"})
