"""Conversations with their answers, for supervised fine-tuning: tokens, and which of them carry loss.

A turn of the assistant is what a model would have generated in its place: the conversation before it is rendered with
the template's generation prompt, and what the template then writes for the turn carries loss, up to the token that ends
it. Text after that token is the template's (a newline, often), and engines never sample it.

A template may write an earlier turn otherwise once another follows, such as without its reasoning. Then each
turn is learned in the history that it would be generated in: the conversation has a branch for every rendering of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_async.errors import DataError
from miles_async.prompts.templates import ChatTemplate
from miles_async.types import Int32, JsonObject, Label, Picture, UInt8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One sequence to learn from."""

    tokens: Int32  # [T], ends with a token that carries loss
    loss_mask: UInt8  # [T]
    messages: int = 0  # of the conversation, up to the last turn that is learned
    pictures: tuple[Picture, ...] = ()  # in the order of their tokens


def answered(template: ChatTemplate, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[Answered]:
    """Branches of a conversation, none without loss. A turn with ``step_loss_mask`` 0 is context only.

    Raises DataError if no turn can be learned, TrajectoryError if the template refuses the conversation.
    """
    require_turn(messages)
    template.check_roles(messages)
    branches: list[_Branch] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:index], tools, {}, generation_prompt=True)
        after = template.render(messages[: index + 1], tools, {}, generation_prompt=False)
        if not after.startswith(before):
            raise DataError(
                "expected the chat template to write an assistant's turn behind its own generation prompt, found "
                f"{after[-80:]!r} instead of a continuation of {before[-80:]!r}"
            )
        if not branches or not before.startswith(branches[-1].text):
            branches.append(_Branch(template))
        learned = _is_learned(message)
        branches[-1].add(before, after, learned=learned)
        if learned:
            branches[-1].messages = index + 1
    found = [branch.answered() for branch in branches if any(branch.mask)]
    if not found:
        raise DataError("expected the chat template to write the assistant's turn, found nothing of it")
    return found


def require_turn(messages: Sequence[JsonObject]) -> None:
    """Raise DataError unless the assistant has a turn to learn, and something to answer."""
    if messages[0]["role"] == "assistant":
        raise DataError("expected something for the assistant to answer, found its turn first")
    if not any(message["role"] == "assistant" and _is_learned(message) for message in messages):
        raise DataError("expected a turn of the assistant to learn, found none")


def _is_learned(message: JsonObject) -> bool:
    return bool(message.get("step_loss_mask", 1) == 1)


def answered_text(template: ChatTemplate, prompt: str, answer: str) -> list[Answered]:
    """A plain prompt and its answer, which the tokenizer's end token follows; without a template."""
    before = list(template.encode(prompt))
    after = [*template.tokenize(answer), template.end_id]
    mask = [0] * len(before) + [1] * len(after)
    return [Answered(tokens=np.array(before + after, np.int32), loss_mask=np.array(mask, np.uint8))]


def one_answer(label: Label | None) -> str:
    """Return the label to learn. Raises DataError unless there is one."""
    if label is None:
        raise DataError("expected an answer, found no label (--label-key)")
    if not isinstance(label, str):
        raise DataError(f"expected one answer to learn, found {len(label)} in its label (--label-key)")
    return label


def conversation(messages: Sequence[JsonObject], label: Label | None) -> Sequence[JsonObject]:
    """The messages if they end with the assistant's, else with the label as its turn. Raises DataError."""
    if messages[-1]["role"] == "assistant":
        return messages
    if label is None:
        raise DataError("expected an answer, found neither a last turn of the assistant nor a label (--label-key)")
    return [*messages, {"role": "assistant", "content": one_answer(label)}]


def tools_of(metadata: JsonObject) -> Sequence[JsonObject]:
    """Tools that the conversation is rendered with: ``tools`` of the row's metadata, as slime has it."""
    tools = metadata.get("tools") or ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"expected tools in the metadata to be a list of objects, found {tools!r:.80}")
    return tools


@dataclass(slots=True)
class _Branch:
    template: ChatTemplate
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    messages: int = 0
    _ended: bool = True  # the last turn has its end token

    def add(self, before: str, after: str, *, learned: bool) -> None:
        """Add a turn: ``before`` continues the text so far, ``after`` continues that."""
        between = self.template.tokenize(before[len(self.text) :])
        turn = self.template.tokenize(after[len(before) :])
        stops = [position for position, token in enumerate(turn) if token in self.template.stop_ids]
        # A template may end a turn by the token that begins the next (GLM), which the model samples as well.
        ends_last = not self._ended and bool(between) and between[0] in self.template.stop_ids
        sampled = stops[-1] + 1 if stops else len(turn)
        self.tokens += [*between, *turn]
        self.mask += [int(ends_last), *[0] * (len(between) - 1)] if between else []
        self.mask += [int(learned)] * sampled + [0] * (len(turn) - sampled)
        self.text, self._ended = after, bool(stops) or not learned

    def answered(self) -> Answered:
        tokens, mask = self.tokens, self.mask
        if not self._ended:
            tokens, mask = [*tokens, self.template.end_id], [*mask, 1]
        length = len(mask) - mask[::-1].index(1)
        return Answered(
            tokens=np.array(tokens[:length], np.int32),
            loss_mask=np.array(mask[:length], np.uint8),
            messages=self.messages,
        )
