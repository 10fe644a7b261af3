"""``f1``: words in common with the label, as in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from miles_async.rewards.answers import answer_part, find_answer, labels_of
from miles_async.types import Prompt, Sample

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


async def f1(prompt: Prompt, sample: Sample) -> float:
    """Harmonic mean of precision and recall over words of the marked answer, failing that of all; 0 to 1.

    Of several labels the best counts.
    """
    answer = find_answer(sample.text)
    marked = answer.mark in ("box", "tags")
    text = answer.text if marked else answer_part(sample.text)
    return max(word_f1(text, label) for label in labels_of(prompt))


def word_f1(answer: str, label: str) -> float:
    """F1 of the words as multisets; case, punctuation and articles don't count.

    >>> word_f1("The red house.", "a red, red house")
    0.8
    """
    found, expected = _words(answer), _words(label)
    if not found or not expected:
        return float(found == expected)
    common = (found & expected).total()
    return 2 * common / (found.total() + expected.total())


def _words(text: str) -> Counter[str]:
    return Counter(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())
