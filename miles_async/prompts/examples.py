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
from miles_async.prompts.source import FilePromptSource, Tools
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import JsonObject, Label, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A row, tokenized with its answers."""

    prompt: Prompt  # without token ids
    epoch: int
    branches: tuple[Answered, ...]  # at least one


class ExampleSource:
    """An endless stream, as of prompts (``prompts.source``). An example that is too long is skipped and counted."""

    def __init__(
        self,
        arguments: DataArguments,
        template: ChatTemplate,
        most_tokens: int,
        *,
        anyway: Collection[str] = (),
        images: PictureProcessor | None = None,
    ) -> None:
        """``most_tokens``: of a sequence. ``anyway``: see :class:`FilePromptSource`. ``images``: None for a model that
        reads none. Raises DataError when a file cannot be used, or a row has no answer to learn.
        """
        self.template = template
        self._skips = arguments.bad_rows == "skip"
        self._templated = arguments.apply_chat_template
        self._limit = PromptLimit(
            most_tokens,
            f"an example has at most {most_tokens}, with its answer",
            "raise --max-tokens-per-gpu, up to the model's positions",
        )
        self._images = images
        self._branches: tuple[Answered, ...] = ()  # of the source's last prompt
        self._source = FilePromptSource(
            arguments,
            lambda content, tools: (0,),  # tokenized here, whole
            self._limit,
            anyway=anyway,
            expand=None if images is None else lambda tokens, sizes: tokens,
            check=None if self._skips else self._require_answer,
            refusal=self._refusal,
        )

    @property
    def skipped(self) -> int:
        """Examples skipped so far."""
        return self._source.skipped

    def require_rendered(self) -> None:
        """See :meth:`FilePromptSource.require_rendered`."""
        if self._templated:
            self._source.require_rendered(self._check)

    def require_usable(self) -> None:
        """See :meth:`FilePromptSource.require_usable`."""
        self._source.require_usable()

    def take(self, count: int) -> list[Example]:
        """Take the next ``count`` examples, never fewer. Raises DataError as :meth:`FilePromptSource.take` does."""
        taken: list[Example] = []
        for _ in range(count):
            [(epoch, prompt)] = self._source.take(1)
            taken.append(Example(prompt=prompt, epoch=epoch, branches=self._branches))
        return taken

    def state(self) -> JsonObject:
        return self._source.state()

    def restore(self, state: JsonObject) -> Sequence[str]:
        return self._source.restore(state)

    def _require_answer(self, row: PromptRow, location: str) -> None:
        try:
            self._answered(row.messages, row.label, row.metadata)
        except DataError as error:
            raise DataError(f"{location}: {error}. Fix the row, or leave such rows out (--bad-rows skip)") from None

    def _check(self, content: Content, tools: Tools) -> None:
        if not isinstance(content, str):
            self.template.check_roles(content)
            self.template.render(content, tools, {}, generation_prompt=False)

    def _answered(
        self, messages: Sequence[JsonObject], label: Label | None, metadata: JsonObject
    ) -> tuple[Sequence[JsonObject], Tools]:
        """The conversation with an answer to learn, and its tools; plain texts are not changed. Raises DataError."""
        if not self._templated:
            one_answer(label)
            return messages, ()
        found = conversation(messages, label)
        require_turn(found)
        return found, tools_of(metadata)

    def _refusal(self, prompt: Prompt) -> str | None:
        """Tokenize an example; say why it is skipped, None if it is not. Raises DataError."""
        try:
            branches = self._tokenized(prompt)
        except (DataError, TrajectoryError) as error:
            if self._skips:
                return str(error)
            raise DataError(f"{prompt.prompt_id}: {error}") from error
        longest = max(len(branch.tokens) for branch in branches)
        if longest > self._limit.tokens:
            return f"{longest} tokens, and {self._limit.reason}"
        self._branches = tuple(branches)
        return None

    def _tokenized(self, prompt: Prompt) -> list[Answered]:
        messages, tools = self._answered(prompt.messages, prompt.label, prompt.metadata)
        if not self._templated:
            return answered_text(self.template, prompt.text, one_answer(prompt.label))
        branches = answered(self.template, messages, tools)
        return [self._with_images(branch, messages, prompt) for branch in branches]

    def _with_images(self, branch: Answered, messages: Sequence[JsonObject], prompt: Prompt) -> Answered:
        """The branch with as many tokens for each of its images as the model reads."""
        if self._images is None:
            return branch
        contents = [message["content"] for message in messages[: branch.messages]]
        count = sum(
            part.get("type") == "image" for content in contents if isinstance(content, list) for part in content
        )
        pictures = prompt.pictures[:count]
        sizes = [(picture.width, picture.height) for picture in pictures]
        tokens = np.array(self._images.expand(branch.tokens.tolist(), sizes), np.int32)
        token, loss_mask = self._images.image_token, np.zeros(len(tokens), np.uint8)
        loss_mask[tokens != token] = branch.loss_mask[branch.tokens != token]
        return replace(branch, tokens=tokens, loss_mask=loss_mask, pictures=pictures)
