"""A trajectory: the turns of one episode as a tree over tokens, and the sample that it becomes.

A turn continues the turn whose messages and reply the agent gave back; what is new is tokenized and appended (M14).
An agent that edits or truncates its history forks the tree at the last turn that it left alone::

    user ── turn ── tool ── turn ── tool ── turn        one branch of the sample: appended tokens have loss mask 0,
                     └───── user ── turn                sampled ones 1, each with its log-prob and weight version (R3)

Every sampled token carries loss in one branch. The one exception is a stop token that the template doesn't write after
the turn, or with which it opens another message: a continuation then follows the template.

Tokens of earlier turns stay even if the template would drop some of them. With ``as_template_writes`` the tree forks
there instead: the turn continues the conversation as the template writes it, as the first turn of a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec
import numpy as np

from miles_async.errors import TrajectoryError
from miles_async.trajectory.messages import Message, canonical, is_echo
from miles_async.trajectory.rendering import Renderer, check_unchanged
from miles_async.trajectory.replies import ReplyParser
from miles_async.trajectory.turn import with_last_token
from miles_async.types import (
    NO_VERSION,
    Branch,
    FinishReason,
    Float32,
    Generation,
    Int32,
    JsonObject,
    RoutedExperts,
    Sample,
    UInt8,
)

Tools = Sequence[JsonObject]


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Context of the next turn: the request of an agent, as tokens."""

    parent: Turn | None
    messages: tuple[Message, ...]  # new after the parent's reply
    tools: Tools
    options: JsonObject  # for the template
    text: str  # of the messages, as the template writes them
    kept: int  # tokens of the parent's output that stay: all, or all but a stop token
    appended: Int32  # tokens after these
    length: int  # tokens in all
    prompt_length: int  # of these, before the first turn of the branch
    appended_text: str  # of ``appended``

    @property
    def routed(self) -> int:
        """Tokens whose experts the turns before have: all of theirs but the last one, which no engine has read."""
        parent = self.parent
        return 0 if parent is None else parent.context.length + min(self.kept, len(parent.sampled.output_ids) - 1)

    def input_ids(self) -> Int32:
        """Tokens for the engine to continue, [length]. Built on each call: storing them would take quadratic memory."""
        pieces: list[Int32] = []
        context = self
        while context.parent is not None:
            pieces += [context.appended, context.parent.sampled.output_ids[: context.kept]]
            context = context.parent.context
        return np.concatenate([context.appended, *pieces[::-1]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One turn of the model, with its context."""

    context: Context
    sampled: Generation
    reply: Message
    text: str  # the whole turn, without the tokens that bound it


@dataclass(eq=False)
class Trajectory:
    """The turns of one episode. Thread-safe; turns are only ever added."""

    renderer: Renderer
    parser: ReplyParser
    as_template_writes: bool = False  # else as it was sampled
    turns: list[Turn] = field(default_factory=list)  # in order of completion

    def extend(self, messages: Sequence[object], tools: Tools = (), options: JsonObject | None = None) -> Context:
        """Turn a conversation whose next turn is the model's into tokens.

        Args:
            messages: the whole conversation, in the form of chat completions.
            tools: offered to the model.
            options: more for the chat template, such as ``enable_thinking``.

        Raises:
            TrajectoryError: messages that cannot be read or rendered, or a template that changed what is in the
                tokens already (with the difference).
        """
        conversation = [canonical(message) for message in messages]
        if not conversation or conversation[-1]["role"] == "assistant":
            raise TrajectoryError("expected messages that end before a turn of the assistant")
        tools, options = list(tools), dict(options or {})
        if not self.as_template_writes:
            return self._continued(conversation, tools, options)
        conversation = self._with_replies(conversation)
        written = self.renderer.chat.render(conversation, tools, options, generation_prompt=True)
        try:
            context = self._continued(conversation, tools, options)
        except TrajectoryError:  # the template changes what is in the tokens
            return self._from_start(conversation, tools, options, written)
        if self._decode(context) == written:
            return context
        return self._from_start(conversation, tools, options, written)

    def add(
        self, context: Context, sampled: Generation, *, stops: Sequence[str] = (), parallel_calls: bool = True
    ) -> Turn:
        """Keep a turn that is over. ``stops``, ``parallel_calls``: what its reply leaves out; see ``ReplyParser``."""
        ids = sampled.output_ids.tolist()
        call_ids = f"call{len(self.turns):03d}"
        reply = self.parser.reply(ids, context.text, context.tools, call_ids, stops=stops, parallel=parallel_calls)
        turn = Turn(context=context, sampled=sampled, reply=reply, text=self.parser.chat.decode(ids))
        self.turns.append(turn)
        return turn

    def _continued(self, conversation: Sequence[Message], tools: Tools, options: JsonObject) -> Context:
        """Context that appends to the turns that ``conversation`` went through."""
        parent, length = self._last_common_turn(conversation, tools, options)
        path = [*_path(parent)]
        sampled = _positions(path)
        *earlier, text = self.renderer.pieces(conversation, sampled, tools, options)
        for turn, now in zip(path, earlier, strict=True):
            check_unchanged(turn.context.text, now)
        kept, appended_text = self._after(parent, text)
        appended = np.array(self.renderer.chat.tokenize(appended_text), np.int32)
        before = 0 if parent is None else parent.context.length + kept
        return Context(
            parent=parent,
            messages=tuple(conversation[length:]),
            tools=tools,
            options=options,
            text=text,
            kept=kept,
            appended=appended,
            length=before + len(appended),
            prompt_length=len(appended) if parent is None else parent.context.prompt_length,
            appended_text=appended_text,
        )

    def _from_start(self, conversation: Sequence[Message], tools: Tools, options: JsonObject, written: str) -> Context:
        """Context of a new branch: the whole conversation as the template has ``written`` it."""
        appended = np.array(self.renderer.chat.tokenize(written), np.int32)
        return Context(
            parent=None,
            messages=tuple(conversation),
            tools=tools,
            options=options,
            text=written,
            kept=0,
            appended=appended,
            length=len(appended),
            prompt_length=len(appended),
            appended_text=written,
        )

    def _decode(self, context: Context) -> str:
        """Decode all tokens of a context."""
        text = context.appended_text
        while (parent := context.parent) is not None:
            said = self.renderer.chat.decode_all(parent.sampled.output_ids[: context.kept].tolist())
            context = parent.context
            text = context.appended_text + said + text
        return text

    def _with_replies(self, conversation: Sequence[Message]) -> list[Message]:
        """Replace echoed replies by the originals: agents drop reasoning, which the template may render."""
        replies = {turn: (*_conversation(turn.context.parent), *turn.context.messages) for turn in self.turns}
        result: list[Message] = []
        for message in conversation:
            known = (
                turn.reply
                for turn, before in replies.items()
                if message["role"] == "assistant" and before == tuple(result) and is_echo(message, turn.reply)
            )
            result.append(next(known, message))
        return result

    def _last_common_turn(
        self, conversation: Sequence[Message], tools: Tools, options: JsonObject
    ) -> tuple[Turn | None, int]:
        """Return the deepest turn that ``conversation`` went through, and the number of messages up to its reply."""
        best: tuple[Turn | None, int] = (None, 0)
        ends: dict[Turn | None, int] = {None: 0}  # turns that match so far → messages up to their reply, inclusive
        for turn in self.turns:  # parents come before their children
            context = turn.context
            start = ends.get(context.parent)
            if start is None or context.tools != tools or context.options != options:
                continue
            end = start + len(context.messages)
            if (
                end < len(conversation)
                and tuple(conversation[start:end]) == context.messages
                and is_echo(conversation[end], turn.reply)
            ):
                ends[turn] = end + 1
                if end + 1 >= best[1]:
                    best = (turn, end + 1)
        return best

    def _after(self, parent: Turn | None, text: str) -> tuple[int, str]:
        """Return (tokens of the parent's output to keep, text to append) for a piece of the template."""
        if parent is None:
            return 0, text
        output_ids, stop_ids = parent.sampled.output_ids, self.renderer.chat.stop_ids
        kept = len(output_ids)
        closing, stop, rest = self.renderer.after_turn(text)
        stopped = kept > 0 and int(output_ids[-1]) in stop_ids
        if stopped and stop == output_ids[-1]:
            return kept, rest
        return kept - stopped, closing + rest

    # -------------------------------------------------------------------------------------------- sample
    def sample(
        self, finish_reason: FinishReason | None = None, rewards: Mapping[Turn, float] | None = None
    ) -> Sample | None:
        """Build the sample: one branch per leaf, the one with most sampled tokens first; None before the first turn.

        Turns that several leaves share carry loss in the first of them. ``text`` is the last turn's, so that the
        reward is that of the end of the episode. ``finish_reason``: None: the last turn's. ``rewards``: of single
        turns, at the last token of each that carries loss.
        """
        if not self.turns:
            return None
        inner = {turn.context.parent for turn in self.turns}
        leaves = sorted((turn for turn in self.turns if turn not in inner), key=lambda leaf: -_sampled_tokens(leaf))
        counted: set[Turn] = set()
        branches = []
        for leaf in leaves:
            branches.append(_branch(leaf, counted, rewards or {}))
            counted.update(_path(leaf))
        first, *more = branches
        last, sampled = self.turns[-1], [turn.sampled for turn in self.turns]
        return Sample(
            **msgspec.structs.asdict(first),
            more_branches=tuple(branch for branch in more if branch.loss_mask.any()),
            text=last.text,
            finish_reason=finish_reason or last.sampled.finish_reason,
            metadata={
                "messages": _conversation(leaves[0]),
                "turns": len(self.turns),
                "constrained_turns": sum(turn.constrained for turn in sampled),
                "engines": list(dict.fromkeys(engine for turn in sampled for engine in turn.engines)),
                "chunks": sum(turn.chunks for turn in sampled),
                "prompt_tokens": sum(turn.prompt_tokens for turn in sampled),
                "cached_tokens": sum(turn.cached_tokens for turn in sampled),
            },
        )


def _branch(leaf: Turn, counted: set[Turn], rewards: Mapping[Turn, float]) -> Branch:
    """Build a branch. ``counted``: turns that carry loss in other branches."""
    path = [*_path(leaf)]
    arrays = _Arrays()
    for turn, following in zip(path, [*path[1:], None], strict=True):
        arrays.append(turn.context.appended)
        kept = len(turn.sampled.output_ids) if following is None else following.context.kept
        arrays.append_sampled(turn.sampled, kept, carries_loss=turn not in counted, reward=rewards.get(turn, 0.0))
    return Branch(
        tokens=np.concatenate(arrays.tokens),
        prompt_length=leaf.context.prompt_length,
        loss_mask=np.concatenate(arrays.loss_mask),
        rollout_logprobs=np.concatenate(arrays.logprobs),
        weight_versions=np.concatenate(arrays.versions),
        routed_experts=with_last_token(_experts(path)),
        token_rewards=np.concatenate(arrays.rewards) if rewards else None,
    )


def _experts(path: Sequence[Turn]) -> RoutedExperts | None:
    """Experts of all tokens of a path but the last; None unless every turn has them."""
    pieces: list[RoutedExperts] = []
    for turn, following in zip(path, [*path[1:], None], strict=True):
        if (experts := turn.sampled.routed_experts) is None:
            return None
        pieces.append(experts if following is None else experts[: following.context.routed - turn.context.routed])
    return np.concatenate(pieces)


class _Arrays:
    """The per-token arrays of a branch, in pieces."""

    def __init__(self) -> None:
        self.tokens: list[Int32] = []
        self.loss_mask: list[UInt8] = []
        self.logprobs: list[Float32] = []
        self.versions: list[Int32] = []
        self.rewards: list[Float32] = []

    def append(self, tokens: Int32) -> None:
        """Append tokens that no engine sampled."""
        count = len(tokens)
        no_versions = np.full(count, NO_VERSION, np.int32)
        self._append(tokens, np.zeros(count, np.uint8), np.zeros(count, np.float32), no_versions)

    def append_sampled(self, sampled: Generation, count: int, *, carries_loss: bool, reward: float) -> None:
        """Append the first ``count`` tokens of a turn. ``reward``: at the last of them that carries loss."""
        tokens, logprobs = sampled.output_ids[:count], sampled.logprobs[:count]
        if not carries_loss:  # they do in another branch
            self.append(tokens)
        elif sampled.constrained:
            chosen = ~(logprobs >= 0)  # the only token that a grammar allows was not chosen; the guard handles NaN
            chosen |= not chosen.any()  # but every turn has an age
            versions = np.where(chosen, sampled.weight_versions[:count], NO_VERSION).astype(np.int32)
            self._append(tokens, chosen.astype(np.uint8), logprobs, versions)
        else:
            self._append(tokens, np.ones(count, np.uint8), logprobs, sampled.weight_versions[:count])
        if carried := np.flatnonzero(self.loss_mask[-1]).tolist():
            self.rewards[-1][carried[-1]] = reward

    def _append(self, tokens: Int32, mask: UInt8, logprobs: Float32, versions: Int32) -> None:
        self.tokens.append(tokens)
        self.loss_mask.append(mask)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.rewards.append(np.zeros(len(tokens), np.float32))


def _path(turn: Turn | None) -> Sequence[Turn]:
    """Turns from the first to this one."""

    def upwards(turn: Turn | None) -> Iterator[Turn]:
        while turn is not None:
            yield turn
            turn = turn.context.parent

    return [*upwards(turn)][::-1]


def _conversation(turn: Turn | None) -> list[Message]:
    """Messages up to the reply of this turn, inclusive."""
    return [message for turn in _path(turn) for message in (*turn.context.messages, turn.reply)]


def _positions(path: Sequence[Turn]) -> list[int]:
    """Positions of the replies of a path's turns in the conversation."""
    return [end - 1 for end in accumulate(len(turn.context.messages) + 1 for turn in path)]


def _sampled_tokens(leaf: Turn) -> int:
    return sum(len(turn.sampled.output_ids) for turn in _path(leaf))
