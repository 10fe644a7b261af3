"""Rows of ``--prompt-data`` as examples to learn from, in the order of prompts, with the same cursor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError, TrajectoryError
from miles_async.prompts.conversations import Answered, answered, answered_text, conversation, one_answer, tools_of
from miles_async.prompts.row import Content
from miles_async.prompts.source import FIRST_SKIPS, POWERS_OF_TEN, FilePromptSource, Tools
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import JsonObject, Prompt

log = structlog.get_logger(__name__)


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
        reads none. Raises DataError when a file cannot be used.
        """
        self.template = template
        self._skips = arguments.bad_rows == "skip"
        self._templated = arguments.apply_chat_template
        self._most = most_tokens
        self._images = images
        # Tokenized here, whole.
        unchanged = None if images is None else lambda tokens, sizes: tokens
        self._source = FilePromptSource(arguments, lambda content, tools: (0,), anyway=anyway, expand=unchanged)
        self.skipped = 0

    def require_rendered(self) -> None:
        if self._templated:
            self._source.require_rendered(self._check)

    def _check(self, content: Content, tools: Tools) -> None:
        if not isinstance(content, str):
            self.template.check_roles(content)
            self.template.render(content, tools, {}, generation_prompt=False)

    def take(self, count: int) -> list[Example]:
        """Take the next ``count`` examples, never fewer. Raises DataError for a row without an answer, and when a whole
        epoch holds none that is short enough, or that the template renders.
        """
        taken: list[Example] = []
        in_a_row = 0
        while len(taken) < count:
            [(epoch, prompt)] = self._source.take(1)
            branches = self._branches(prompt)
            longest = max((len(branch.tokens) for branch in branches), default=0)
            if branches and longest <= self._most:
                taken.append(Example(prompt=prompt, epoch=epoch, branches=tuple(branches)))
                in_a_row = 0
                continue
            self.skipped, in_a_row = self.skipped + 1, in_a_row + 1
            if self.skipped <= FIRST_SKIPS or self.skipped in POWERS_OF_TEN:
                why = f"{longest} tokens, and {self._most} at most" if branches else "the chat template refuses it"
                log.warning("example skipped", prompt_id=prompt.prompt_id, reason=why, so_far=self.skipped)
            if in_a_row == len(self._source):
                refused = ", or the chat template refuses them" if self._skips else ""
                raise DataError(
                    f"{self._source.name}: all {in_a_row} examples have more than {self._most} tokens{refused}: raise "
                    "--max-tokens-per-gpu, up to the model's positions"
                )
        return taken

    def state(self) -> JsonObject:
        return self._source.state()

    def restore(self, state: JsonObject) -> Sequence[str]:
        return self._source.restore(state)

    def _branches(self, prompt: Prompt) -> list[Answered]:
        """None if the template refuses the conversation and ``--bad-rows skip`` allows that. Raises DataError."""
        try:
            if not self._templated:
                if prompt.label is None:
                    raise DataError("expected an answer, found no label (--label-key)")
                return answered_text(self.template, prompt.text, one_answer(prompt.label))
            messages = conversation(prompt.messages, prompt.label)
            branches = answered(self.template, messages, tools_of(prompt.metadata))
            return [self._with_images(branch, messages, prompt) for branch in branches]
        except (DataError, TrajectoryError) as error:
            if self._skips and isinstance(error, TrajectoryError):
                return []
            raise DataError(f"{prompt.prompt_id}: {error}") from error

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
