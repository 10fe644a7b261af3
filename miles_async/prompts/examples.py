"""Rows of ``--prompt-data`` as examples to learn from, in the order of prompts, with the same cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_limit import PromptLimit
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.conversations import (
    Answered,
    answered,
    answered_text,
    conversation,
    one_answer,
    require_turn,
    tools_of,
)
from miles_async.prompts.row import Content, PromptRow
from miles_async.prompts.row_source import RowSource, Tools
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import JsonObject, Picture, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A row, tokenized with its answers."""

    prompt: Prompt  # without token ids
    epoch: int
    branches: tuple[Answered, ...]  # at least one


class ExampleSource(RowSource[tuple[Prompt, list[Answered]]]):
    """An endless stream, as of prompts. An example that is too long is skipped and counted."""

    def __init__(
        self,
        arguments: DataArguments,
        template: ChatTemplate,
        most_tokens: int,
        *,
        anyway: Collection[str] = (),
        images: PictureProcessor | None = None,
    ) -> None:
        """``most_tokens``: of a sequence. ``anyway``: see :class:`RowSource`. ``images``: None for a model that reads
        none. Raises DataError when a file cannot be used, or a row has no answer to learn.
        """
        self.template = template
        self._templated = arguments.apply_chat_template
        self._images = images
        self._longest = PromptLimit(
            most_tokens,
            f"an example has at most {most_tokens}, with its answer",
            "raise --max-tokens-per-gpu, up to the model's positions",
        )
        check = None if arguments.bad_rows == "skip" else self._require_answer
        super().__init__(arguments, self._longest, anyway=anyway, reads_images=images is not None, check=check)

    def take(self, count: int) -> list[Example]:
        """Take the next ``count`` examples, never fewer. Raises DataError as :meth:`FilePromptSource.take` does."""
        taken = [self._next() for _ in range(count)]
        return [Example(prompt=prompt, epoch=epoch, branches=tuple(branches)) for epoch, (prompt, branches) in taken]

    def _require_answer(self, row: PromptRow, location: str) -> None:
        try:
            self._answered(row)
        except DataError as error:
            raise DataError(f"{location}: {error}. Fix the row, or leave such rows out (--bad-rows skip)") from None

    def check(self, content: Content, tools: Tools) -> None:
        """Render a conversation, for :meth:`require_rendered`. Raises TrajectoryError when the template refuses it."""
        if not isinstance(content, str):
            self.template.check_roles(content)
            self.template.render(content, tools, {}, generation_prompt=False)

    def _check_row(self, row: PromptRow) -> None:
        self._answered(row)

    def _answered(self, row: PromptRow) -> tuple[Sequence[JsonObject], Tools]:
        """The conversation with an answer to learn, and its tools; plain texts are not changed. Raises DataError."""
        if not self._templated:
            one_answer(row.label)
            return row.messages, ()
        messages = conversation(row.messages, row.label)
        require_turn(messages)
        return messages, tools_of(row.metadata)

    def _made(self, row: PromptRow, index: int) -> tuple[Prompt, list[Answered]] | str:
        self._refuse_unread_images(row, index)
        prompt = self._prompt(row, index, ())
        try:
            branches = self._tokenized(row, prompt.pictures)
        except (DataError, TrajectoryError) as error:
            if self._skips:
                return str(error)
            raise DataError(f"{prompt.prompt_id}: {error}") from error
        longest = max(len(branch.tokens) for branch in branches)
        if longest > self._longest.tokens:
            return f"{longest} tokens, and {self._longest.reason}"
        return prompt, branches

    def _tokenized(self, row: PromptRow, pictures: Sequence[Picture]) -> list[Answered]:
        messages, tools = self._answered(row)
        if not self._templated:
            return answered_text(self.template, row.text, one_answer(row.label))
        return [self._with_images(each, messages, pictures) for each in answered(self.template, messages, tools)]

    def _with_images(self, branch: Answered, messages: Sequence[JsonObject], pictures: Sequence[Picture]) -> Answered:
        """The branch with as many tokens for each of its images as the model reads."""
        if self._images is None:
            return branch
        contents = [message["content"] for message in messages[: branch.messages]]
        count = sum(
            part.get("type") == "image" for content in contents if isinstance(content, list) for part in content
        )
        sizes = [(picture.width, picture.height) for picture in pictures[:count]]
        tokens = np.array(self._images.expand(branch.tokens.tolist(), sizes), np.int32)
        token, loss_mask = self._images.image_token, np.zeros(len(tokens), np.uint8)
        loss_mask[tokens != token] = branch.loss_mask[branch.tokens != token]
        return replace(branch, tokens=tokens, loss_mask=loss_mask, pictures=tuple(pictures[:count]))
