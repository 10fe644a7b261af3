"""An endless, shuffled stream over the rows of ``--prompt-data``, with a cursor that resumes exactly.

All rows are checked once when the source is opened. A row that is too long, or that the chat template refuses under
``--bad-rows skip``, is skipped and counted. In which order rows come is decided in ``prompts.order``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.earlier_rates import earlier_rates
from miles_async.prompts.identity import changed_prompts, identity
from miles_async.prompts.order import Stream, make_order, next_stream, rates_from_json, rates_to_json
from miles_async.prompts.row import Content, PromptRow
from miles_async.prompts.rows import CheckRow, open_prompts
from miles_async.staleness.events import EpochBegan
from miles_async.types import JsonObject, Prompt

logger = logging.getLogger(__name__)

FIRST_SKIPS = 5  # skipped prompts that are logged one by one; after that only their number
POWERS_OF_TEN = frozenset(10**exponent for exponent in range(1, 12))

CHECKED_ROWS = 100_000  # rows that are rendered at the start, in 2 to 5 s; of a larger file as many, evenly spaced
SHOWN_ROWS = 3  # refused rows that an error names

Tools = Sequence[JsonObject]

Made = TypeVar("Made")


class RowSource(ABC, Generic[Made]):
    """Yields what a subclass makes of each row, in order. Raises DataError when a file cannot be used."""

    def __init__(
        self,
        arguments: DataArguments,
        limit: PromptLimit | None,
        *,
        anyway: Collection[str],
        reads_images: bool,
        began: Callable[[EpochBegan], None] = lambda event: None,
        check: CheckRow | None = None,
    ) -> None:
        """``limit``: most tokens; None: any number. ``anyway``: what may have changed since a checkpoint
        (``--load-anyway``). ``reads_images``: whether the model does. ``began``: called when an epoch begins.
        ``check``: a further check of every row.
        """
        self._arguments = arguments
        self._skips = arguments.bad_rows == "skip"
        self._limit = limit
        self._anyway = anyway
        self._reads_images = reads_images
        self._rows = open_prompts(arguments, check)
        self._weights = arguments.weights or (1.0,)
        self._earlier = earlier_rates(self._rows, arguments)
        self._rates = dict(self._earlier)  # row → pass rate of its last group; of prompts that were tried
        self._began = began
        self._streams = self._opened_streams()
        self._skipped: set[str] = set()  # ids of prompts

    @abstractmethod
    def _made(self, row: PromptRow, index: int) -> Made | str:
        """Convert a row, or return why it is skipped. Raises DataError."""

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

    @property
    def name(self) -> str:
        """The files, for messages."""
        return self._rows.name

    @property
    def skipped(self) -> int:
        """Prompts skipped so far."""
        return len(self._skipped)

    def _next(self) -> tuple[int, Made]:
        """Return the epoch and the next usable row, converted. Raises DataError when whole epochs hold none."""
        number = next_stream([stream.given for stream in self._streams], self._weights)
        stream = self._streams[number]
        while True:
            try:
                epoch, index = stream.next()
            except LookupError:
                raise self._none_usable(number) from None
            if (made := self._usable(index)) is not None:
                stream.used()
                return epoch, made

    def _usable(self, index: int) -> Made | None:
        """Convert a row; return None, and count it, if it is skipped."""
        row = self._rows.read(index)
        made = self._made(row, index)
        if not isinstance(made, str):
            return made
        self._note_skip(self._rows.prompt_id(row, index), made)
        return None

    def require_usable(self) -> None:
        """Check that some row can be used, with weights one of each file, reading until one is found.

        Raises DataError.
        """
        for number in range(len(self._streams)):
            found = (self._made(self._rows.read(index), index) for index in self._stream_rows(number)[1])
            if all(isinstance(made, str) for made in found):
                raise self._none_usable(number)

    def require_rendered(self, check: Callable[[Content, Tools], None]) -> None:
        """Check that the chat template renders all rows, or ``CHECKED_ROWS`` of them, unless bad ones are skipped.

        ``check`` raises TrajectoryError for a row that is refused. Raises DataError naming the first such rows.
        """
        if not self._skips and (refused := self._refused_rows(check)):
            raise self._refused(*refused)

    def skip_notes(self, check: Callable[[Content, Tools], None]) -> Iterator[str]:
        """Yield a note if some of the rows that :meth:`require_rendered` looks at are refused, and will be skipped."""
        if self._skips and (refused := self._refused_rows(check)):
            looked_at = min(len(self._rows), CHECKED_ROWS)
            yield f"{len(refused)} of {looked_at} rows are skipped (--bad-rows skip), the first: {refused[0]}"

    def _refused_rows(self, check: Callable[[Content, Tools], None]) -> list[str]:
        refused: list[str] = []
        for index in np.unique(np.linspace(0, len(self._rows) - 1, min(len(self._rows), CHECKED_ROWS)).astype(int)):
            row = self._rows.read(int(index))
            try:
                self._check_row(row)
                check(row.content, row.tools)
            except (DataError, TrajectoryError) as error:
                refused.append(f"{self._rows.location(int(index))}: {error}")
        return refused

    def _check_row(self, row: PromptRow) -> None:
        """Raise DataError if a subclass needs what the row does not have."""

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

    def _prompt(self, row: PromptRow, index: int, token_ids: Sequence[int]) -> Prompt:
        return Prompt(
            prompt_id=self._rows.prompt_id(row, index),
            token_ids=tuple(token_ids),
            text=row.text,
            messages=row.messages,
            label=row.label,
            metadata=row.metadata,
            pictures=tuple(image.read() for image in row.images),
        )

    def _refuse_unread_images(self, row: PromptRow, index: int) -> None:
        if row.images and not self._reads_images:
            raise DataError(
                f"{self._rows.location(index)}: the prompt has images, and the model (--hf-checkpoint) reads none"
            )

    def _stream_rows(self, number: int) -> tuple[str, range]:
        """Name and rows of a stream: with weights those of a file, else all."""
        if len(self._streams) == 1:
            return self.name, range(len(self._rows))
        return self._rows.files[number].place, self._rows.ranges[number]

    def _none_usable(self, number: int) -> DataError:
        name, rows = self._stream_rows(number)
        if self._skips:
            first = self._made(self._rows.read(rows.start), rows.start)
            location = self._rows.location(rows.start)
            return DataError(f"{name}: all {len(rows)} rows are skipped, the first, {location}, since: {first}")
        if self._limit is None:
            return self._refused(f"{name}: the chat template refuses all rows")
        return DataError(
            f"{name}: all {len(rows)} prompts have more than {self._limit.tokens} tokens "
            f"({self._limit.reason}): {self._limit.change}"
        )

    def _refused(self, *problems: str) -> DataError:
        more = f" (and {len(problems) - SHOWN_ROWS} more rows)" if len(problems) > SHOWN_ROWS else ""
        return DataError(
            f"{'; '.join(problems[:SHOWN_ROWS])}{more}. Fix these rows, or leave them out (--bad-rows skip)"
        )

    def _note_skip(self, prompt_id: str, reason: str) -> None:
        if prompt_id in self._skipped:
            return
        self._skipped.add(prompt_id)
        count = len(self._skipped)
        if count <= FIRST_SKIPS or count in POWERS_OF_TEN:
            logger.warning("prompt %s skipped: %s (%d prompts skipped so far)", prompt_id, reason, count)
