"""The prompt source: an endless, shuffled stream over prompt data, with a cursor that resumes exactly.

All rows are checked once when the source is opened; prompts are tokenized when they are taken. A prompt that is longer
than the limit (``arguments.prompt_limit``), or that the chat template refuses under ``--bad-rows skip``, is skipped and
counted. In which order rows come is decided in ``prompts.order``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit, asked_limit
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.earlier_rates import earlier_rates, pass_rate
from miles_async.prompts.identity import changed_prompts, identity
from miles_async.prompts.order import Stream, make_order, next_stream, rates_from_json, rates_to_json
from miles_async.prompts.row import Content, PromptRow
from miles_async.prompts.rows import CheckRow, open_prompts
from miles_async.staleness.events import EpochBegan, Finished, PoolEvent, PromptsOpened
from miles_async.types import JsonObject, Prompt

logger = logging.getLogger(__name__)

FIRST_SKIPS = 5  # skipped prompts that are logged one by one; after that only their number
POWERS_OF_TEN = frozenset(10**exponent for exponent in range(1, 12))

CHECKED_ROWS = 100_000  # rows that are rendered at the start, in 2 to 5 s; of a larger file as many, evenly spaced
SHOWN_ROWS = 3  # refused rows that an error names

Tools = Sequence[JsonObject]

Encode = Callable[[Content, Tools], Sequence[int]]
"""Encoder of a text or messages, and the row's tools, to token ids; usually ``ChatTemplate.encode``."""


ExpandImages = Callable[[Sequence[int], Sequence[tuple[int, int]]], Sequence[int]]
"""(token ids with one token per image, width and height of each image) → token ids as the model reads them; usually
``PictureProcessor.expand``.
"""


class FilePromptSource:
    """``PromptSource`` over ``--prompt-data``.

    ``encode`` turns the content of a row into token ids. Raises DataError when a file cannot be used.
    """

    def __init__(
        self,
        arguments: DataArguments,
        encode: Encode,
        limit: PromptLimit | None = None,
        *,
        anyway: Collection[str] = (),
        began: Callable[[EpochBegan], None] = lambda event: None,
        expand: ExpandImages | None = None,
        check: CheckRow | None = None,
        refusal: Callable[[Prompt], str | None] = lambda prompt: None,
    ) -> None:
        """``limit``: longest prompt; None: ``--rollout-max-prompt-len`` alone decides. ``anyway``: what may have
        changed since a checkpoint (``--load-anyway``). ``began``: called when an epoch begins.
        ``expand``: None for a model that reads no images. ``check``: a further check of every row. ``refusal``: says
        why a prompt is skipped that is short enough.
        """
        self._arguments = arguments
        self._encode = encode
        self._expand = expand
        self._limit = limit or asked_limit(arguments)
        self._anyway = anyway
        self._refusal = refusal
        self._rows = open_prompts(arguments, check)
        self._weights = arguments.weights or (1.0,)
        self._earlier = earlier_rates(self._rows, arguments)
        self._rates = dict(self._earlier)  # row → pass rate of its last group; of prompts that were tried
        self._began = began
        self._streams = self._opened_streams()
        self._skipped: set[str] = set()  # ids of prompts

    def _opened_streams(self) -> list[Stream]:
        seed = self._arguments.rollout_seed
        if len(self._weights) == 1:
            return [self._stream(range(len(self._rows)), [seed], "all")]
        files = enumerate(zip(self._rows.ranges, self._rows.files, strict=True))
        return [self._stream(rows, [seed, number], file.label) for number, (rows, file) in files]

    def _stream(self, rows: range, seed: Sequence[int], name: str) -> Stream:
        sampler = self._arguments.prompt_sampler

        def began(epoch: int, given: int) -> None:
            self._began(EpochBegan(name, epoch, sampler, prompts=given, left_out=max(0, len(rows) - given)))

        order = make_order(rows, self._arguments, seed, lambda: self._rates, lambda row: self._rows.read(row).metadata)
        return Stream(order, began)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def name(self) -> str:
        """The files, for messages."""
        return self._rows.name

    @property
    def skipped(self) -> int:
        """Prompts skipped so far."""
        return len(self._skipped)

    @property
    def opened(self) -> PromptsOpened:
        """The prompt files and their digests, for the ledger."""
        return PromptsOpened({file.label: file.digest for file in self._rows.files}, len(self._earlier))

    def find(self, prompt_id: str) -> tuple[int, int] | None:
        """Find a prompt's place in the first epoch, from 1, and its tokens; None if there is no such prompt."""
        for stream in self._opened_streams():
            for position, index in enumerate(stream.rows, start=1):
                row = self._rows.read(int(index))
                if self._rows.prompt_id(row, int(index)) == prompt_id:
                    return position, self._length(row, int(index))
        return None

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Take the next ``count`` prompts as (epoch, prompt), never fewer.

        Raises DataError when a whole epoch holds no prompt that is short enough.
        """
        return [self._take(self._next_stream()) for _ in range(count)]

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

    def _next_stream(self) -> int:
        return next_stream([stream.given for stream in self._streams], self._weights)

    def _take(self, number: int) -> tuple[int, Prompt]:
        stream = self._streams[number]
        while True:
            try:
                epoch, index = stream.next()
            except LookupError:
                raise self._none_usable(number) from None
            if (prompt := self._prompt(index)) is not None:
                stream.used()
                return epoch, prompt

    def require_usable(self) -> None:
        """Check that some prompt can be used, with weights one of each file, reading until one is found.

        Raises DataError.
        """
        for number in range(len(self._streams)):
            found = (self._made(self._rows.read(index), index) for index in self._stream_rows(number)[1])
            if not any(isinstance(made, Prompt) for made in found):
                raise self._none_usable(number)

    def require_rendered(self, check: Callable[[Content, Tools], None]) -> None:
        """Check that the chat template renders all rows, or ``CHECKED_ROWS`` of them, unless bad ones are skipped.

        ``check`` raises TrajectoryError for a row that is refused. Raises DataError naming the first such rows.
        """
        if self._arguments.bad_rows == "skip":
            return
        refused: list[str] = []
        for index in np.unique(np.linspace(0, len(self._rows) - 1, min(len(self._rows), CHECKED_ROWS)).astype(int)):
            row = self._rows.read(int(index))
            try:
                check(row.content, row.tools)
            except TrajectoryError as error:
                refused.append(f"{self._rows.location(int(index))}: {error}")
        if refused:
            raise self._refused(*refused)

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
        for prompt in map(self._prompt, range(len(self._rows))):
            if prompt is not None:
                usable += 1
                yield prompt
        if not usable:
            raise self._none_usable(0)

    def texts(self) -> Iterator[Sequence[int]]:
        """Token ids of every prompt in file order, of any length. The cursor stays."""
        for index in range(len(self._rows)):
            if tokens := self._tokens(self._rows.read(index), index):
                yield tokens

    def state(self) -> JsonObject:
        """Return the cursor, with the identity of the files it points into."""
        streams = [stream.state() for stream in self._streams]
        cursor = streams[0] if len(streams) == 1 else {"streams": streams}
        known = {"known": rates_to_json(dict(self._rates))} if self._rates else {}
        return {**cursor, **known, **identity(self._rows, self._arguments, self._earlier)}

    def restore(self, state: JsonObject) -> Sequence[str]:
        """Continue where :meth:`state` was taken.

        Raises CheckpointError if the prompts have changed, unless ``--load-anyway`` allows that. Then returns what has
        changed, and continues with the next epoch.
        """
        saved = state.get("streams", [state])
        changes = changed_prompts(state, self._rows, self._arguments, self._earlier, self._anyway)
        self._rates = dict(self._earlier) if changes else rates_from_json(state.get("known", []))
        for number, stream in enumerate(self._streams):
            if changes:
                stream.skip_to(1 + max(int(position["epoch"]) for position in saved))
            else:
                stream.restore(saved[number], self.name)
        return changes

    def _stream_rows(self, number: int) -> tuple[str, range]:
        """Name and rows of a stream: with weights those of a file, else all."""
        if len(self._streams) == 1:
            return self.name, range(len(self._rows))
        return self._rows.files[number].place, self._rows.ranges[number]

    def _none_usable(self, number: int) -> DataError:
        name, rows = self._stream_rows(number)
        if self._limit is None:
            return self._refused(f"{name}: the chat template refuses all rows")
        refused = ", or are refused (--bad-rows skip)" if self._arguments.bad_rows == "skip" else ""
        return DataError(
            f"{name}: all {len(rows)} prompts have more than {self._limit.tokens} tokens "
            f"({self._limit.reason}){refused}: {self._limit.change}"
        )

    def _refused(self, *problems: str) -> DataError:
        more = f" (and {len(problems) - SHOWN_ROWS} more rows)" if len(problems) > SHOWN_ROWS else ""
        return DataError(
            f"{'; '.join(problems[:SHOWN_ROWS])}{more}. Fix these rows, or leave them out (--bad-rows skip)"
        )

    def _tokens(self, row: PromptRow, index: int) -> Sequence[int] | None:
        """Token ids, None if the template refuses the row and ``--bad-rows skip`` allows that. Raises DataError."""
        if row.images and self._expand is None:
            raise DataError(
                f"{self._rows.location(index)}: the prompt has images, and the model (--hf-checkpoint) reads none"
            )
        try:
            tokens = self._encode(row.content, row.tools)
            if self._expand is None:
                return tokens
            return self._expand(tokens, [image.size() for image in row.images])
        except TrajectoryError as error:
            if self._arguments.bad_rows == "skip":
                return None
            raise self._refused(f"{self._rows.location(index)}: {error}") from error

    def _length(self, row: PromptRow, index: int) -> int:
        return len(self._tokens(row, index) or ())

    def _prompt(self, index: int) -> Prompt | None:
        """The prompt of one row, or None if it is too long or refused."""
        row = self._rows.read(index)
        made = self._made(row, index)
        if isinstance(made, Prompt):
            return made
        self._note_skip(self._rows.prompt_id(row, index), made)
        return None

    def _made(self, row: PromptRow, index: int) -> Prompt | str:
        """The prompt of a row, or why it is skipped. Raises DataError."""
        tokens = self._tokens(row, index)
        if tokens is None:
            return "the chat template refuses it"
        token_ids = tuple(tokens)
        if not token_ids:
            raise DataError(f"{self._rows.location(index)}: the tokenizer makes no tokens of this prompt: {row.text!r}")
        if self._limit is not None and len(token_ids) > self._limit.tokens:
            return f"{len(token_ids)} tokens, and {self._limit.reason}"
        prompt = Prompt(
            prompt_id=self._rows.prompt_id(row, index),
            token_ids=token_ids,
            text=row.text,
            messages=row.messages,
            label=row.label,
            metadata=row.metadata,
            pictures=tuple(image.read() for image in row.images),
        )
        return self._refusal(prompt) or prompt

    def _note_skip(self, prompt_id: str, reason: str) -> None:
        if prompt_id in self._skipped:
            return
        self._skipped.add(prompt_id)
        count = len(self._skipped)
        if count <= FIRST_SKIPS or count in POWERS_OF_TEN:
            logger.warning("prompt %s skipped: %s (%d prompts skipped so far)", prompt_id, reason, count)
