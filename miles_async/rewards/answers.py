r"""Find the answer in a response: one rule for all rewards that compare it.

The answer is the last marked text after the thoughts: a box (``\boxed{}``, ``\fbox{}``), ``<answer>`` tags or a line
with ``####``, unless it is a heading; a box inside tags is opened. Without a mark it is the text after the last "answer
is", else everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from miles_async.errors import RewardError
from miles_async.types import Prompt

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(.*)$", re.MULTILINE)  # as GSM8K writes answers
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")  # no command of LaTeX
_PHRASE = re.compile(
    r"(?<!\bthis )\banswer\b[*_ \t]*(?:is\b|:|=)[*_ \t]*:?\s*(?:(?:\\\[|\$\$|```\w*)[ \t]*\n\s*)?"
    r"((?:(?!\banswer\b).)+)",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.;](?=\s|$)|,(?=\s+(?:not|since|because|so)\b)")

THOUGHT_ENDS = ("</think>", "[/THINK]", "<|channel|>final<|message|>", "<channel|>")
"""Ends of the thoughts; the second in models of Mistral, then gpt-oss, then Gemma 4."""

Mark = Literal["box", "tags", "hashes", "phrase", "none"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, and by which mark it was found."""

    text: str
    mark: Mark


def find_answer(response: str) -> Answer:
    r"""Find the answer of a response; its text is empty if the last box was never closed.

    >>> find_answer(r"First \boxed{3}. Wait, it is \boxed{\frac{1}{2}}.")
    Answer(text='\\frac{1}{2}', mark='box')
    >>> find_answer("Of 12, <answer> 72 </answer>")
    Answer(text='72', mark='tags')
    >>> find_answer("So the answer is 3.5, not 4. Good luck.")
    Answer(text='3.5', mark='phrase')
    """
    part = answer_part(response)
    ends: list[tuple[int, str, Mark]] = [_last_box(part)] if _BOX.search(part) else []
    found: tuple[tuple[list[re.Match[str]], Mark], ...] = (([*TAGS.finditer(part)], "tags"), (_marked(part), "hashes"))
    ends += [(matches[-1].end(), matches[-1][1].strip(), mark) for matches, mark in found if matches]
    if ends:
        _, text, mark = max(ends)
        if mark != "box" and _BOX.search(text):
            return Answer(_last_box(text)[1], "box")
        return Answer(text, mark)
    if phrases := _PHRASE.findall(part):
        return Answer(_CLAUSE_END.split(phrases[-1])[0].strip(" \t*_"), "phrase")
    return Answer(part.strip(), "none")


def _marked(text: str) -> list[re.Match[str]]:
    """Lines with ``####``. Those with words are headings of Markdown, such as "#### Step 2", except at the end."""
    lines = [*_HASHES.finditer(text)]
    return [
        line for line in lines if not _WORD.search(line[1]) or (line is lines[-1] and not text[line.end() :].strip())
    ]


def _last_box(text: str) -> tuple[int, str, Mark]:
    r"""End and content of the last box, with balanced braces; ``\boxed 5`` holds one word."""
    *_, opened = _BOX.finditer(text)
    start = opened.end()
    if not text.startswith("{", start):
        word = re.match(r"[^\s$]*", text[start:])
        assert word is not None
        return start + word.end(), word[0].rstrip(".,"), "box"
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 1  # the next character is no brace of the box: \{
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position + 1, text[start + 1 : position].strip(), "box"
        position += 1
    return len(text), "", "box"


def answer_part(response: str) -> str:
    """Return the text after the last end of thoughts (``THOUGHT_ENDS``); the whole response if it has none."""
    return response[max((at + len(end) for end in THOUGHT_ENDS if (at := response.rfind(end)) >= 0), default=0) :]


def labels_of(prompt: Prompt) -> tuple[str, ...]:
    """Return the accepted answers. Raises RewardError when the prompt has none."""
    if prompt.label is None:
        raise RewardError(f"prompt {prompt.prompt_id} has no label to compare with: set --label-key")
    return (prompt.label,) if isinstance(prompt.label, str) else prompt.label
