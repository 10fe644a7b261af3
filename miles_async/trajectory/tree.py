"""A trajectory: the turns of one episode as a tree over tokens, and the sample that it becomes.

A turn continues the turn whose messages and reply the agent gave back; new messages are tokenized and appended (M14).
An agent that edits or truncates its history forks the tree at the last turn that it left alone::

    user ── turn ── tool ── turn ── tool ── turn        one branch of the sample: appended tokens have loss mask 0,
                     └───── user ── turn                sampled ones 1, each with its log-prob and weight version (R3)

Every sampled token carries loss in one branch. The one exception is a stop token that the template doesn't write after
the turn, such as a token that stands for an image, or with which it opens another message: a continuation then follows
the template.

Tokens of earlier turns stay even if the template would drop some of them. With ``as_template_writes`` the tree forks
there instead: the turn continues the conversation as the template writes it, as the first turn of a branch.

A turn takes as long after 500 turns as after 5: a request that continues the latest one is read from where that ended
(every message before is compared), and what the template writes for it is rendered abridged (``next_text.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from miles_async.errors import EngineError, TrajectoryError
from miles_async.runtime.nesting import storable
from miles_async.trajectory.branches import make_branch
from miles_async.trajectory.context import Context, Tools, Turn, conversation_to, depth_of, path_to
from miles_async.trajectory.messages import Message, canonical, images_of, is_echo, no_images
from miles_async.trajectory.next_text import check_abridged, next_text, renders_whole
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import CALL_ID, ReplyParser, extends
from miles_async.types import Branch, FinishReason, Generation, Int32, JsonObject, Picture, Sample, TurnSpan

_LITTLE = 1 << 12  # characters of new messages: rendered and tokenized faster than handed to a thread and back
_MOST_TOKENS = 4  # that a character has
_FEW = 32  # messages of a conversation, all of which are rendered as fast


class _Request(NamedTuple):
    """The latest request, which the next one usually continues."""

    messages: Sequence[object] = ()  # as they came
    conversation: tuple[Message, ...] = ()
    context: Context | None = None
    input_ids: Int32 = np.empty(0, np.int32)

    def begins(self, messages: Sequence[object]) -> bool:
        """Return whether ``messages`` extend this request's."""
        return bool(self.messages) and messages[: len(self.messages)] == self.messages


@dataclass(eq=False)
class Trajectory:
    """The turns of one episode. Thread-safe; turns are only ever added."""

    renderer: Renderer
    parser: ReplyParser
    as_template_writes: bool = False  # else as it was sampled
    turns: list[Turn] = field(default_factory=list)  # in order of completion
    _latest: _Request = field(default=_Request(), init=False)
    _pictures: dict[str, Picture] = field(default_factory=dict, init=False)  # by digest

    def keep_image(self, url: str) -> str:
        """Keep the image of a ``data:`` URL for messages that name its digest. Raises TrajectoryError."""
        images = self.renderer.images
        return no_images(url) if images is None else self.keep_picture(images.read(url, self._pictures))

    def keep_picture(self, picture: Picture) -> str:
        """Keep an image, and return its digest."""
        return self._pictures.setdefault(picture.digest, picture).digest

    def extend(self, messages: Sequence[object], tools: Tools = (), options: JsonObject | None = None) -> Context:
        """Turn a conversation whose next turn is the model's into tokens.

        Args:
            messages: the whole conversation, in the form of chat completions. Must not be changed afterwards.
            tools: offered to the model.
            options: more for the chat template, such as ``enable_thinking``.

        Raises:
            TrajectoryError: messages that cannot be read or rendered, or a template that changed what is in the
                tokens already (with the difference).
        """
        self._latest = latest = self._read(messages, tools, options)
        assert latest.context is not None
        return latest.context

    def count(self, messages: Sequence[object], tools: Tools = (), options: JsonObject | None = None) -> int:
        """Count the tokens of a conversation: as :meth:`extend` makes them if the model's turn is next, else the text's
        tokens. Raises TrajectoryError as that does.
        """
        if not messages or canonical(messages[-1])["role"] != "assistant":
            return len(self._read(messages, tools, options).input_ids)
        conversation = [canonical(message) for message in messages]
        text = self.renderer.chat.render(conversation, tools, options or {}, generation_prompt=False)
        return len(self.renderer.tokenize(text, self._pictures_of(conversation)))

    def _read(self, messages: Sequence[object], tools: Tools, options: JsonObject | None) -> _Request:
        messages, latest = list(messages), self._latest
        if not latest.begins(messages):
            latest = _Request()
        conversation = (*latest.conversation, *map(canonical, messages[len(latest.messages) :]))
        if not conversation or conversation[-1]["role"] == "assistant":
            raise TrajectoryError("expected messages that end before a turn of the assistant")
        tools, options = list(tools), dict(options or {})
        if self.as_template_writes:
            context = self._as_written(self._with_replies(conversation), tools, options)
        else:
            context = self._continued(conversation, tools, options, latest.context)
        parent = context.parent
        if parent is not None and parent.context is latest.context:
            new = [parent.sampled.output_ids[: context.kept], context.appended]
            input_ids = np.concatenate([latest.input_ids, *new])
        else:
            input_ids = context.input_ids()
        return _Request(messages, conversation, context, input_ids)

    def input_ids(self, context: Context) -> Int32:
        """Return ``context.input_ids()``, which for the latest context need not be built from all turns."""
        latest = self._latest
        return latest.input_ids if latest.context is context else context.input_ids()

    def adds_little(self, messages: Sequence[object], tools: Tools) -> bool:
        """Return whether :meth:`extend` takes less time than handing it to a thread and back."""
        messages, latest = list(messages), self._latest
        if not latest.begins(messages):
            return len(str(messages)) + len(str(tools)) <= _LITTLE
        whole = self.as_template_writes or renders_whole(len(self.turns))
        new = messages[len(latest.messages) :]
        return len(str(new)) <= _LITTLE and (not whole or len(messages) <= _FEW)

    def add(
        self,
        context: Context,
        sampled: Generation,
        *,
        stops: Sequence[str] = (),
        parallel_calls: bool = True,
        shown: Message | None = None,
    ) -> Turn:
        """Keep a finished turn. ``stops``, ``parallel_calls``: what its reply leaves out; ``shown``: what was streamed
        of it. See ``ReplyParser``.

        Raises EngineError, and keeps nothing, if the reply does not continue what was shown.
        """
        chat = self.parser.chat
        text = chat.decode(sampled.output_ids.tolist()) if sampled.text is None else chat.trim(sampled.text)
        call_ids = f"{CALL_ID}{len(self.turns):03d}"
        reply = self.parser.reply(
            text, context.text, context.tools, call_ids, stops=stops, parallel=parallel_calls, shown=shown
        )
        if shown is not None and not extends(reply, shown):
            raise EngineError(f"{shown} was streamed, but the whole answer is {reply}")
        turn = Turn(context=context, sampled=sampled, reply=reply, text=text)
        self.turns.append(turn)
        return turn

    def _continued(
        self, conversation: Sequence[Message], tools: Tools, options: JsonObject, latest: Context | None = None
    ) -> Context:
        """Context that appends to the turns that ``conversation`` went through.

        ``latest``: of the request that the conversation continues, if it does.
        """
        parent = self._deepest_turn(conversation, tools, options, latest)
        new = conversation[0 if parent is None else parent.context.position + 1 :]
        abridge = not self.as_template_writes
        text, abridged = next_text(self.renderer, parent, new, tools, options, abridge=abridge)
        return self._context(parent, new, tools, options, text, abridged=abridged)

    def _deepest_turn(
        self, conversation: Sequence[Message], tools: Tools, options: JsonObject, latest: Context | None
    ) -> Turn | None:
        """Return the deepest turn that ``conversation`` went through, the last one of several."""

        def echoed(turn: Turn) -> bool:
            context = turn.context
            return (
                context.position < len(conversation)
                and context.tools == tools
                and context.options == options
                and is_echo(conversation[context.position], turn.reply)
            )

        turns = [*self.turns]
        if turns and (last := turns[-1]).context is latest and echoed(last):
            if all(turn.context.position < last.context.position for turn in turns[:-1]):
                return last  # the conversation went through all in front of it, and nothing else is as deep
        through: set[Turn | None] = {None}
        deepest: Turn | None = None
        for turn in turns:  # parents come before their children
            context = turn.context
            start = context.position - len(context.messages)
            if (
                context.parent in through
                and conversation[start : context.position] == context.messages
                and echoed(turn)
            ):
                through.add(turn)
                if deepest is None or context.position >= deepest.context.position:
                    deepest = turn
        return deepest

    def _context(
        self,
        parent: Turn | None,
        new: Sequence[Message],
        tools: Tools,
        options: JsonObject,
        text: str,
        *,
        abridged: bool = False,
    ) -> Context:
        """Context of ``new`` messages after ``parent``, which the template writes as ``text``."""
        kept, appended_text = self._after(parent, text)
        pictures = self._pictures_of(new)
        appended = np.array(self.renderer.tokenize(appended_text, pictures), np.int32)
        before = None if parent is None else parent.context
        return Context(
            parent=parent,
            first=parent if before is None else before.first or parent,
            depth=depth_of(parent),
            messages=tuple(new),
            position=len(new) + (0 if before is None else before.position + 1),
            tools=tools,
            options=options,
            text=text,
            abridged=abridged,
            kept=kept,
            appended=appended,
            appended_text=appended_text,
            length=len(appended) + (0 if before is None else before.length + kept),
            pictures=pictures if before is None else before.pictures + pictures,
        )

    def _pictures_of(self, messages: Sequence[Message]) -> tuple[Picture, ...]:
        digests = [digest for message in messages for digest in images_of(message)]
        if unknown := [digest for digest in digests if digest not in self._pictures]:
            raise TrajectoryError(f"expected images as parts of type image_url, found an image {unknown[0][:80]!r}")
        return tuple(self._pictures[digest] for digest in digests)

    def _as_written(self, conversation: Sequence[Message], tools: Tools, options: JsonObject) -> Context:
        """Context with the conversation as the template writes it, in a new branch where the sample differs."""
        written = self.renderer.chat.render(conversation, tools, options, generation_prompt=True)
        with suppress(TrajectoryError):  # the template changes earlier text
            context = self._continued(conversation, tools, options)
            if self._decode(context) == written:
                return context
        return self._context(None, conversation, tools, options, written)

    def _decode(self, context: Context) -> str:
        """Decode all tokens of a context."""
        text = context.appended_text
        while (parent := context.parent) is not None:
            said = self.renderer.chat.decode_all(parent.sampled.output_ids[: context.kept].tolist())
            context = parent.context
            text = context.appended_text + said + text
        return text

    def _with_replies(self, conversation: Sequence[Message]) -> tuple[Message, ...]:
        """Replace echoed replies by the originals: agents drop reasoning, which the template may render."""
        result: list[Message] = []
        for message in conversation:
            known = (
                turn.reply
                for turn in self.turns
                if message["role"] == "assistant"
                and turn.context.position == len(result)
                and is_echo(message, turn.reply)
                and [*conversation_to(turn.context.parent), *turn.context.messages] == result
            )
            result.append(next(known, message))
        return tuple(result)

    def _after(self, parent: Turn | None, text: str) -> tuple[int, str]:
        """Return (tokens of the parent's output to keep, text to append) for a piece of the template."""
        if parent is None:
            return 0, text
        output_ids, stop_ids = parent.sampled.output_ids, self.renderer.chat.stop_ids
        if self.renderer.images is not None:
            stop_ids |= self.renderer.images.placeholders
        kept = len(output_ids)
        closing, stop, rest = self.renderer.after_turn(text)
        stopped = kept > 0 and int(output_ids[-1]) in stop_ids
        if stopped and self.renderer.stop_tokens.get(stop) == output_ids[-1]:
            return kept, rest
        if stop in self.renderer.chat.stop_texts:
            end = self.renderer.chat.decode_all(output_ids[-_MOST_TOKENS * len(stop) :].tolist())
            _, found, more = end.rpartition(stop)  # more: of a token that begins in the stop
            if found and rest.startswith(more):
                return kept, rest.removeprefix(more)
        return kept - stopped, closing + rest

    # -------------------------------------------------------------------------------------------- sample
    def sample(
        self, finish_reason: FinishReason | None = None, rewards: Mapping[Turn, float] | None = None
    ) -> Sample | None:
        """Build the sample: one branch per leaf, the one with most sampled tokens first; None before the first turn.

        Turns that several leaves share carry loss in the first of them. ``text`` is the last turn's, so that the reward
        judges the end of the episode. ``finish_reason``: None: the last turn's. ``rewards``: of single turns, at the
        last token of each that carries loss.

        Raises TransientEngineError if the template writes a whole conversation differently than was assumed, so that
        the episode has to be repeated.
        """
        if not self.turns:
            return None
        inner = {turn.context.parent for turn in self.turns}
        leaves = sorted((turn for turn in self.turns if turn not in inner), key=lambda leaf: -_sampled_tokens(leaf))
        for turn in self.turns if not self.renderer.abridges else leaves:
            check_abridged(self.renderer, turn.context)
        counted: set[Turn] = set()
        branches, spans = list[Branch](), list[list[TurnSpan]]()
        for leaf in leaves:
            branch, of_branch = make_branch(leaf, counted, rewards or {})
            if not branches or branch.loss_mask.any():
                branches.append(branch)
                spans.append(of_branch)
            counted.update(path_to(leaf))
        first, *more = branches
        last, sampled = self.turns[-1], [turn.sampled for turn in self.turns]
        return Sample(
            **msgspec.structs.asdict(first),
            more_branches=tuple(more),
            text=last.text,
            finish_reason=finish_reason or last.sampled.finish_reason,
            metadata={
                "messages": storable(conversation_to(leaves[0])),
                "turns": len(self.turns),
                "turn_spans": [[[*span] for span in each] for each in spans],  # plain data
                "constrained_turns": sum(turn.constrained for turn in sampled),
                "engines": list(dict.fromkeys(engine for turn in sampled for engine in turn.engines)),
                "chunks": sum(turn.chunks for turn in sampled),
                "prompt_tokens": sum(turn.prompt_tokens for turn in sampled),
                "cached_tokens": sum(turn.cached_tokens for turn in sampled),
            },
        )


def _sampled_tokens(leaf: Turn) -> int:
    return sum(len(turn.sampled.output_ids) for turn in path_to(leaf))
