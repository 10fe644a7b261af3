"""``multiple_choice``: the response chooses the label's letter."""

from __future__ import annotations

import re

from miles_async.errors import RewardError
from miles_async.rewards.answers import answer_part, label_of
from miles_async.types import Prompt, Sample

_CHOICES = (  # what says it most clearly first; the last match of the first pattern that matches counts
    re.compile(r"\\boxed\{(?:\\(?:text|mathrm|textbf)\{)?\W?([A-Z])\W*\}"),
    re.compile(r"(?i:\banswer|\bchoice|\boption)\W{0,5}(?i:is\b)?\W{0,5}([A-Z])\b"),
    re.compile(r"^\W*([A-Z])(?:[).:]|\W*$)", re.MULTILINE),
)


async def multiple_choice(prompt: Prompt, sample: Sample) -> float:
    """1 if the letter that the response chooses is the label's, else 0. Raises RewardError for another label."""
    try:
        letter = read_letter(label_of(prompt))
    except RewardError as error:
        raise RewardError(f"prompt {prompt.prompt_id}: {error}") from error
    return float(chosen_letter(answer_part(sample.text)) == letter)


def read_letter(label: str) -> str:
    """Read the letter of a label such as ``(b)``. Raises RewardError if it is none."""
    letter = label.strip().strip("().").upper()
    if not re.fullmatch("[A-Z]", letter):
        raise RewardError(f"multiple_choice compares letters, the label is {letter!r}")
    return letter


def chosen_letter(answer: str) -> str | None:
    r"""The choice as a letter, None if there is none.

    >>> chosen_letter("Not (A), since ... The answer is **(C)**.")
    'C'
    """
    for pattern in _CHOICES:
        if found := pattern.findall(answer):
            return str(found[-1])
    return None
