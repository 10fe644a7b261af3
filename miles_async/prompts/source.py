"""The prompt source: an endless, shuffled stream over one file, with a cursor that resumes exactly.

All rows are checked once when the source is opened; prompts are tokenized when they are taken. A prompt that is longer
than the limit (``arguments.prompt_limit``), or that the chat template refuses under ``--bad-rows skip``, is skipped and
counted. The order of an epoch is a function of
(``--rollout-seed``, epoch, number of rows) alone, so the cursor is two integers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit, asked_limit
from miles_async.errors import CheckpointError, ConfigurationError, DataError, TrajectoryError
from miles_async.prompts.files import RowFile, open_row_file
from miles_async.prompts.row import Content, PromptRow, read_row
from miles_async.types import Int64, JsonObject, Label, Prompt

logger = logging.getLogger(__name__)

FIRST_SKIPS = 5  # skipped prompts that are logged one by one; after that only their number
POWERS_OF_TEN = frozenset(10**exponent for exponent in range(1, 12))

CHECKED_ROWS = 100_000  # rows that are rendered at the start, in 2 to 5 s; of a larger file as many, evenly spaced
SHOWN_ROWS = 3  # refused rows that an error names

Tools = Sequence[JsonObject]

Encode = Callable[[Content, Tools], Sequence[int]]
"""Encoder of a text or messages, and the row's tools, to token ids; usually ``ChatTemplate.encode``."""


CheckRow = Callable[[Label | None, JsonObject, str], None]
"""Check of a row by its label, metadata and location; raises DataError that begins with the location."""


def require_same_prompts(state: JsonObject, rows: RowFile, arguments: DataArguments) -> None:
    """Check that ``state``, a cursor, points into these rows in this order. Raises CheckpointError."""
    flags = {"digest": "--prompt-data", "shuffle": "--rollout-shuffle", "seed": "--rollout-seed"}
    for key, value in _identity(rows, arguments).items():
        if state.get(key) != value:
            raise CheckpointError(
                f"{rows.path}: cannot continue in the middle of other prompts: {key} was {state.get(key)!r} when the "
                f"checkpoint was written and is {value!r} now. Restore {flags.get(key, '--prompt-data')}, or start a "
                "new run without --load"
            )


def _identity(rows: RowFile, arguments: DataArguments) -> JsonObject:
    return {
        "file": rows.path.name,
        "rows": len(rows),
        "digest": rows.digest,
        "shuffle": arguments.rollout_shuffle,
        "seed": arguments.rollout_seed,
    }


def open_prompts(arguments: DataArguments, check: CheckRow | None = None) -> RowFile:
    """Open ``--prompt-data`` and check every row: 20,000 rows take well under a second.

    ``check``: a further check of each row, such as that it can be rewarded.

    Raises DataError naming file and line: bad JSON, not an object, missing key, wrong type, duplicate id.
    """
    if arguments.prompt_data is None:
        raise ConfigurationError("--prompt-data is required: a .jsonl or .parquet file of prompts")
    rows = open_row_file(arguments.prompt_data, arguments)
    first_with: dict[str, int] = {}
    for index, row in enumerate(rows):
        location = rows.location(index)
        checked = read_row(row, arguments, location)
        if check is not None:
            check(checked.label, checked.metadata, location)
        row_id = checked.row_id
        if row_id is not None and first_with.setdefault(row_id, index) != index:
            earlier = rows.number(first_with[row_id])
            raise DataError(
                f"{location}: duplicate id {row_id!r} in {arguments.prompt_id_key!r} (--prompt-id-key): "
                f"line {earlier} has it too"
            )
    return rows


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt in its file."""

    position: int  # in the order of the first epoch, from 1
    tokens: int


class FilePromptSource:
    """``PromptSource`` over a .jsonl or .parquet file.

    ``encode`` turns the content of a row into token ids. Raises DataError when the file cannot be used.
    """

    def __init__(self, arguments: DataArguments, encode: Encode, limit: PromptLimit | None = None) -> None:
        """``limit``: longest prompt; None: ``--rollout-max-prompt-len`` alone decides."""
        self._arguments = arguments
        self._encode = encode
        self._limit = limit or asked_limit(arguments)
        self._rows = open_prompts(arguments)
        self._epoch = 0
        self._position = 0  # rows of this epoch that were read, skipped ones too
        self._order = self._epoch_order(0)
        self._usable_in_epoch = 0  # found since the epoch began, or since the cursor was restored
        self._began_at = 0  # position where this object began the epoch
        self._skipped: set[str] = set()  # ids of prompts

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def path(self) -> Path:
        """The file."""
        return self._rows.path

    def find(self, prompt_id: str) -> Place | None:
        """Find a prompt's place in the first epoch and its length; None if there is no such prompt."""
        for position, index in enumerate(self._epoch_order(0), start=1):
            row = self._row(int(index))
            if self._prompt_id(row, int(index)) == prompt_id:
                return Place(position=position, tokens=self._length(row, int(index)))
        return None

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Take the next ``count`` prompts as (epoch, prompt), never fewer.

        Raises DataError when a whole epoch holds no prompt that is short enough.
        """
        taken: list[tuple[int, Prompt]] = []
        while len(taken) < count:
            if self._position == len(self._rows):
                self._begin_next_epoch()
            prompt = self._prompt(int(self._order[self._position]))
            self._position += 1
            if prompt is not None:
                self._usable_in_epoch += 1
                taken.append((self._epoch, prompt))
        return taken

    def require_usable(self) -> None:
        """Check that some prompt can be used, reading until one is found. Raises DataError."""
        found = (self._tokens(self._row(index), index) for index in range(len(self._rows)))
        limit = self._limit
        if not any(tokens is not None and (limit is None or len(tokens) <= limit.tokens) for tokens in found):
            raise self._none_usable()

    def require_rendered(self, check: Callable[[Content, Tools], None]) -> None:
        """Check that the chat template renders all rows, or ``CHECKED_ROWS`` of them, unless bad ones are skipped.

        ``check`` raises TrajectoryError for a row that is refused. Raises DataError naming the first such rows.
        """
        if self._arguments.bad_rows == "skip":
            return
        refused: list[str] = []
        for index in np.unique(np.linspace(0, len(self._rows) - 1, min(len(self._rows), CHECKED_ROWS)).astype(int)):
            row = self._row(int(index))
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
        added = self._length(self._row(0), 0)
        for index in range(len(self._rows)):
            row = self._row(index)
            if len(msgspec.json.encode((row.content, row.tools))) + added * len(row.messages) > tokens:
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
            raise self._none_usable()

    def texts(self) -> Iterator[Sequence[int]]:
        """Token ids of every prompt in file order, of any length. The cursor stays."""
        for index in range(len(self._rows)):
            if tokens := self._tokens(self._row(index), index):
                yield tokens

    def state(self) -> JsonObject:
        """Return the cursor, with the identity of the file it points into."""
        return {"epoch": self._epoch, "position": self._position, **_identity(self._rows, self._arguments)}

    def restore(self, state: JsonObject) -> None:
        """Continue where :meth:`state` was taken. Raises CheckpointError if the prompts have changed."""
        require_same_prompts(state, self._rows, self._arguments)
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._rows):
            raise CheckpointError(f"{self._rows.path}: cursor out of range: epoch {epoch}, position {position}")
        self._epoch, self._position = epoch, position
        self._order = self._epoch_order(epoch)
        self._usable_in_epoch, self._began_at = 0, position

    def _epoch_order(self, epoch: int) -> Int64:
        """[rows] row indices in the order of this epoch."""
        if not self._arguments.rollout_shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._arguments.rollout_seed, epoch]).permutation(len(self._rows))

    def _begin_next_epoch(self) -> None:
        if self._began_at == 0 and self._usable_in_epoch == 0:
            raise self._none_usable()
        self._epoch += 1
        self._position = self._began_at = self._usable_in_epoch = 0
        self._order = self._epoch_order(self._epoch)

    def _none_usable(self) -> DataError:
        if self._limit is None:
            return self._refused(f"{self._rows.path}: the chat template refuses all rows")
        refused = ", or the chat template refuses them" if self._arguments.bad_rows == "skip" else ""
        return DataError(
            f"{self._rows.path}: all {len(self._rows)} prompts have more than {self._limit.tokens} tokens "
            f"({self._limit.reason}){refused}: {self._limit.change}"
        )

    def _refused(self, *problems: str) -> DataError:
        more = f" (and {len(problems) - SHOWN_ROWS} more rows)" if len(problems) > SHOWN_ROWS else ""
        return DataError(
            f"{'; '.join(problems[:SHOWN_ROWS])}{more}. Mend these rows, or leave them out (--bad-rows skip)"
        )

    def _tokens(self, row: PromptRow, index: int) -> Sequence[int] | None:
        """Token ids, None if the template refuses the row and ``--bad-rows skip`` allows that. Raises DataError."""
        try:
            return self._encode(row.content, row.tools)
        except TrajectoryError as error:
            if self._arguments.bad_rows == "skip":
                return None
            raise self._refused(f"{self._rows.location(index)}: {error}") from error

    def _length(self, row: PromptRow, index: int) -> int:
        return len(self._tokens(row, index) or ())

    def _prompt(self, index: int) -> Prompt | None:
        """The prompt of one row, or None if it is too long or refused."""
        row = self._row(index)
        prompt_id = self._prompt_id(row, index)
        tokens = self._tokens(row, index)
        if tokens is None:
            self._note_skip(prompt_id, "the chat template refuses it")
            return None
        token_ids = tuple(tokens)
        if not token_ids:
            raise DataError(f"{self._rows.location(index)}: the tokenizer makes no tokens of this prompt: {row.text!r}")
        if self._limit is not None and len(token_ids) > self._limit.tokens:
            self._note_skip(prompt_id, f"{len(token_ids)} tokens, and {self._limit.reason}")
            return None
        return Prompt(
            prompt_id=prompt_id,
            token_ids=token_ids,
            text=row.text,
            messages=row.messages,
            label=row.label,
            metadata=row.metadata,
        )

    def _row(self, index: int) -> PromptRow:
        return read_row(self._rows.read(index), self._arguments, self._rows.location(index))

    def _prompt_id(self, row: PromptRow, index: int) -> str:
        return row.row_id if row.row_id is not None else f"{self._rows.path.name}:{self._rows.number(index)}"

    def _note_skip(self, prompt_id: str, reason: str) -> None:
        if prompt_id in self._skipped:
            return
        self._skipped.add(prompt_id)
        count = len(self._skipped)
        if count <= FIRST_SKIPS or count in POWERS_OF_TEN:
            logger.warning("prompt %s skipped: %s (%d prompts skipped so far)", prompt_id, reason, count)


__all__ = ["Encode", "FilePromptSource", "PromptRow", "open_prompts"]
