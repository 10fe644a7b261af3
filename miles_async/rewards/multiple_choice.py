"""``multiple_choice``: the response chooses the label's letter."""

from __future__ import annotations

import re

from miles_async.errors import RewardError
from miles_async.rewards.answers import answer_part, find_answer, labels_of
from miles_async.types import Prompt, Sample

_STYLE = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathbb)(?=\{)|[{}$*_]")
_NAMED = re.compile(r"\A(?:answer|choice|option)\b\W{0,3}", re.IGNORECASE)  # Option B
_ALONE = re.compile(r"\(?([A-Za-z])[\W]*")
_WITH_ITS_TEXT = re.compile(r"\(?([A-Za-z])(?:[).:](?:\s|~|\\)|\)(?=\w))")  # also (B)~12 and (B)\ 12
_IN_PROSE = (  # clearest first; the last match of the first pattern that matches counts
    re.compile(
        r"(?i:\banswer|\bchoice|\boption)\W{0,5}(?i:is\b)?\W{0,5}([A-Z])\b(?![ ]+(?!because\b|since\b|as\b)[a-z])"
    ),
    re.compile(r"\(?\b([A-Z])\)? (?i:is) (?i:the )?(?i:correct|right|best)\b"),
    re.compile(
        r"(?i:\banswer|\bchoice|\boption)\W{0,5}(?i:is\b)?\W{0,5}\(([a-z])\)"
        r"(?!\W{0,3}(?:or\b|and\b|/)|[ ]+(?!because\b|since\b|as\b)[a-z])"
    ),
    re.compile(  # the answer is b.
        r"(?i:\banswer|\bchoice|\boption)\W{0,5}(?:(?i:is)\b|(?<=[:=]))[\s*_$:]{0,5}([a-z])\b"
        r"(?=[*_$]*[.!][*_$]*(?:\s|\Z)|[\s*_$]*\Z)"
    ),
    re.compile(
        r"\bI(?:['’](?:d|ll)| would| will)? (?:choose|pick|select|go with)\W{1,5}([A-Z])\b"
        r"(?![ ]+(?!because\b|since\b)[a-z]|, ?[A-HJ-Z]\b)"  # not: A as the origin; A, B and C as corners
    ),
    re.compile(r"\A\W*([A-Z])[).:](?!(?s:.*)^[ \t*(]*[A-Z][).:])", re.MULTILINE),  # and no list of them
    re.compile(r"(?i:\banswer|\bchoice|\boption)[^.\n]{0,300}?\b(?!I\b|A\b)([A-Z])\b"),
    re.compile(r"^[^\w\n]*([A-Z])(?:[).:]|\W*$)", re.MULTILINE),
)
_DENIED = re.compile(r"(?:(?:not|n['’]t)(?: be)?|\bneither|\bnor)\W{1,5}$")  # ends before the letter
_REJECTED = re.compile(r"\W{0,3}(?:can be |is )(?:ruled out|excluded|eliminated|wrong|incorrect|false|not)\b")
_AFTER_ANOTHER = re.compile(r"\b[A-Z]\b\W{1,5}(?:or|and)\W{1,5}$")
_BEFORE_ANOTHER = re.compile(r"(?:\W{1,5}or\W{1,5}|\W{1,5}and \(|\W{0,3}/\W{0,3})(?:(?!I\b)[A-Z]\b|[a-z]\))")


async def multiple_choice(prompt: Prompt, sample: Sample) -> float:
    """1 if the letter that the response chooses is a label, else 0. Raises RewardError for another label."""
    try:
        letters = [read_letter(label) for label in labels_of(prompt)]
    except RewardError as error:
        raise RewardError(f"prompt {prompt.prompt_id}: {error}") from error
    return float(chosen_letter(sample.text) in letters)


def read_letter(label: str) -> str:
    """Read the letter of a label such as ``(b)``. Raises RewardError if it is not one."""
    letter = label.strip().strip("().").upper()
    if not re.fullmatch("[A-Z]", letter):
        raise RewardError(f"multiple_choice compares letters, the label is {letter!r}")
    return letter


def chosen_letter(response: str) -> str | None:
    r"""The choice as a letter, None if there is none, or several: ``The answer is A or B``.

    >>> chosen_letter("Not (A), since ... The answer is **(C)**.")
    'C'
    >>> chosen_letter(r"\boxed{\mathbf{d}}")
    'D'
    """
    answer = find_answer(response)
    if answer.mark in ("box", "tags", "hashes"):
        plain = _NAMED.sub("", _STYLE.sub("", answer.text).strip())
        found = _ALONE.fullmatch(plain) or _WITH_ITS_TEXT.match(plain)
        if found is not None and not _BEFORE_ANOTHER.match(plain, found.end(1)):
            return found[1].upper()
        if answer.mark == "box":
            return None
    prose = answer.text if answer.mark in ("tags", "hashes") else answer_part(response)
    for pattern in _IN_PROSE:
        letters = [found for found in pattern.finditer(prose) if not _is_denied(found)]
        if letters:
            last = letters[-1]
            several = _AFTER_ANOTHER.search(_before(last)) or _BEFORE_ANOTHER.match(prose, last.end(1))
            return None if several else last[1].upper()
    return None


def _is_denied(found: re.Match[str]) -> bool:
    return bool(_DENIED.search(_before(found)) or _REJECTED.match(found.string, found.end(1)))


def _before(found: re.Match[str]) -> str:
    """The characters before a letter; all would make a text of many letters slow."""
    return found.string[max(0, found.start(1) - 20) : found.start(1)]
