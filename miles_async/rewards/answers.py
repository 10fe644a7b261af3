"""Find the answer in a response."""

from __future__ import annotations

from miles_async.errors import RewardError
from miles_async.types import Prompt


def answer_part(response: str) -> str:
    """Return the text after the last ``</think>``; the whole response if it has none."""
    return response.rpartition("</think>")[2]


def label_of(prompt: Prompt) -> str:
    """Return the label. Raises RewardError when the prompt has none."""
    if prompt.label is None:
        raise RewardError(f"prompt {prompt.prompt_id} has no label to compare with: set --label-key")
    return prompt.label
