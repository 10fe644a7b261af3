"""``math``: math-verify compares two mathematical answers.

It works in a worker process: its own time limit needs the main thread, and numbers like 10^(10^10) hold up an
interpreter where no signal can interrupt it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from miles_async.rewards.answers import find_answer, labels_of
from miles_async.rewards.units import read_quantity
from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt, Sample

_CLOCK = re.compile(  # to it, a division
    r"\b0?(\d{1,2}(?::[0-5]\d)+)(?!\d)(?:(?:\s|~|\\[ ,;])*([ap])\.?m\b\.?)?", re.IGNORECASE
)
_THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")  # 1\,000
_WORDS = re.compile(r"(?!(?:sin|cos|tan|log|exp|sqrt)\b)[A-Za-z]{4,}(?: [A-Za-z]+)*")  # to it, a product of letters
_UNIT = re.compile(r"(?<=\d) +[A-Za-z]{2,}(?: [A-Za-z]+)*\.?$")  # 72 eggs
_SPELLED_OUT = re.compile(r"[A-Za-z]{4,}\.?$")  # 5 dollars, but not 2 mg, which may be a product
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


async def math_reward(workers: WorkerPool, prompt: Prompt, sample: Sample) -> float:
    """1 if the last answer in the response (``answers.find_answer``) equals a label, 0 if it doesn't.

    If equality cannot be decided, or not in time, that is a RewardError and not a 0.
    """
    answer, labels = find_answer(sample.text), labels_of(prompt)
    arguments = (answer.text, answer.mark != "none", labels)
    return float(await workers.call(is_any_right, *arguments, needs=["math_verify"]))


def is_any_right(answer: str, marked: bool, labels: Sequence[str]) -> bool:
    """Compare with each of several labels; raise if no one is equal and one cannot be decided."""
    problem: Exception | None = None
    for label in labels:
        try:
            if is_right(answer, marked, label):
                return True
        except Exception as error:  # another label may be equal
            problem = error
    if problem is not None:
        raise problem
    return False


def is_right(answer: str, marked: bool, label: str) -> bool:
    """Compare in the worker. ``marked``: the answer is an expression, not prose that holds one.

    Raises what math-verify raises when it cannot decide.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    expected_text = _TEXT.sub(r"\1", label).strip(" $")
    answer_text = _TEXT.sub(r"\1", answer)
    if time := _CLOCK.fullmatch(expected_text):
        *_, (clock, half) = [("", ""), *_CLOCK.findall(answer_text)]
        return clock == time[1] and (not time[2] or half.lower() == time[2].lower())
    if _WORDS.fullmatch(expected_text) and marked:
        return answer_text.strip(" $.*").casefold() == expected_text.casefold()
    if marked and answer and answer_text.strip(" $").rstrip(".") == expected_text.rstrip("."):
        return True
    wanted, given = read_quantity(expected_text), read_quantity(answer_text)
    if wanted and given:
        if wanted.unit != given.unit:
            return False
        label, answer = wanted.number, given.number
    elif wanted and marked and _SPELLED_OUT.search(expected_text):
        label = wanted.number
    expected = parse(_as_mathematics(_plain(label)), parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no mathematics in the label {label!r}")
    answer = _UNIT.sub("", _plain(answer) if marked else _THIN_SPACE.sub("", answer))
    found = parse(_as_mathematics(answer) if marked and answer else answer, parsing_timeout=None)
    try:
        return bool(verify(expected, found, timeout_seconds=None, raise_on_error=True))
    except Exception:  # one way of comparing them fails; another one may still find them equal
        if verify(expected, found, timeout_seconds=None):
            return True
        raise


def _plain(text: str) -> str:
    """An expression without a text command around all of it, a full stop, and spaces in numbers."""
    text = _TEXT.sub(r"\1", text) if _TEXT.fullmatch(text) else text
    return _THIN_SPACE.sub("", text.removesuffix("."))


def _as_mathematics(text: str) -> str:
    return text if "\\boxed" in text or "$" in text.replace("\\$", "") else f"\\boxed{{{text}}}"
