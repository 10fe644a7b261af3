"""The prompt source: rows of ``--prompt-data`` as prompts, tokenized when they are taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit, asked_limit
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.earlier_rates import pass_rate
from miles_async.prompts.row import Content, PromptRow
from miles_async.prompts.row_source import RowSource, Tools
from miles_async.staleness.events import EpochBegan, Finished, PoolEvent, PromptsOpened
from miles_async.types import Prompt

Encode = Callable[[Content, Tools], Sequence[int]]
"""Encoder of a text or messages, and the row's tools, to token ids; usually ``ChatTemplate.encode``."""


ExpandImages = Callable[[Sequence[int], Sequence[tuple[int, int]]], Sequence[int]]
"""(token ids with one token per image, width and height of each image) → token ids as the model reads them; usually
``PictureProcessor.expand``.
"""


class FilePromptSource(RowSource[Prompt]):
    """``PromptSource`` over ``--prompt-data``. A prompt that is longer than the limit is skipped and counted."""

    def __init__(
        self,
        arguments: DataArguments,
        encode: Encode,
        limit: PromptLimit | None = None,
        *,
        anyway: Collection[str] = (),
        began: Callable[[EpochBegan], None] = lambda event: None,
        expand: ExpandImages | None = None,
    ) -> None:
        """``encode``: turns the content of a row into token ids. ``limit``: longest prompt; None:
        ``--rollout-max-prompt-len`` alone decides. ``expand``: None for a model that reads no images. For the others
        see :class:`RowSource`.
        """
        super().__init__(
            arguments, limit or asked_limit(arguments), anyway=anyway, reads_images=expand is not None, began=began
        )
        self._encode = encode
        self._expand = expand

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def opened(self) -> PromptsOpened:
        """The prompt files and their digests, for the ledger."""
        return PromptsOpened({file.label: file.digest for file in self._rows.files}, len(self._earlier))

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Take the next ``count`` prompts as (epoch, prompt), never fewer.

        Raises DataError when a whole epoch holds no prompt that is short enough.
        """
        return [self._next() for _ in range(count)]

    def note(self, event: PoolEvent) -> None:
        """Learn from finished groups how many of their samples solved the prompt; a ``PoolObserver``."""
        if not isinstance(event, Finished) or self._arguments.prompt_sampler == "uniform":
            return
        prompt = event.group.attempt.prompt
        row = self._rows.index(prompt.prompt_id)
        rewards = [sample.reward for sample in event.group.samples if sample.reward is not None]
        if row is not None and rewards and self._holds(row, prompt):
            self._rates[row] = pass_rate(rewards, self._arguments.solved_reward)

    def _holds(self, index: int, prompt: Prompt) -> bool:
        """Whether the row still has this prompt: one of before ``--load-anyway`` may only share its id."""
        row = self._rows.read(index)
        return (row.text, row.label) == (prompt.text, prompt.label)

    def find(self, prompt_id: str) -> tuple[int, int] | None:
        """Find a prompt's place in the first epoch, from 1, and its tokens; None if there is no such prompt."""
        for stream in self._opened_streams():
            for position, index in enumerate(stream.rows, start=1):
                row = self._rows.read(int(index))
                if self._rows.prompt_id(row, int(index)) == prompt_id:
                    return position, self._length(row, int(index))
        return None

    def lengths_above(self, tokens: int) -> list[int]:
        """Token counts of all prompts with more than ``tokens``.

        Only prompts with enough bytes of text are tokenized, since a token has one at least. The first prompt's tokens
        stand for what the chat template adds to a message.
        """
        found = []
        added = self._length(self._rows.read(0), 0)
        for index in range(len(self._rows)):
            row = self._rows.read(index)
            bytes_of_text = len(msgspec.json.encode((row.content, row.tools)))
            if row.images or bytes_of_text + added * len(row.messages) > tokens:
                found.append(self._length(row, index))
        return [length for length in found if length > tokens]

    def all_prompts(self) -> Iterator[Prompt]:
        """Yield every prompt once, in file order, for evaluation; too long ones are skipped.

        Prompts are tokenized lazily. Raises DataError at the end if there was none.
        """
        usable = 0
        for prompt in map(self._usable, range(len(self._rows))):
            if prompt is not None:
                usable += 1
                yield prompt
        if not usable:
            raise self._none_usable(0)

    def texts(self) -> Iterator[Sequence[int]]:
        """Token ids of every prompt in file order, of any length. The cursor stays."""
        for index in range(len(self._rows)):
            tokens = self._tokens(self._rows.read(index), index)
            if tokens and not isinstance(tokens, str):
                yield tokens

    def _tokens(self, row: PromptRow, index: int) -> Sequence[int] | str:
        """Token ids, or why the template refuses the row, if ``--bad-rows skip`` allows that. Raises DataError."""
        self._refuse_unread_images(row, index)
        try:
            tokens = self._encode(row.content, row.tools)
            if self._expand is None:
                return tokens
            return self._expand(tokens, [image.size() for image in row.images])
        except TrajectoryError as error:
            if self._skips:
                return str(error)
            raise self._refused(f"{self._rows.location(index)}: {error}") from error

    def _length(self, row: PromptRow, index: int) -> int:
        tokens = self._tokens(row, index)
        return 0 if isinstance(tokens, str) else len(tokens)

    def _made(self, row: PromptRow, index: int) -> Prompt | str:
        tokens = self._tokens(row, index)
        if isinstance(tokens, str):
            return tokens
        if not len(tokens):
            raise DataError(f"{self._rows.location(index)}: the tokenizer makes no tokens of this prompt: {row.text!r}")
        if self._limit is not None and len(tokens) > self._limit.tokens:
            return f"{len(tokens)} tokens, and {self._limit.reason}"
        return self._prompt(row, index, tokens)
