"""Rewards that look at the text alone: ``exact_match``, ``f1`` and ``format``."""

from __future__ import annotations

import re
import string
from collections import Counter

from miles_async.rewards.answers import answer_part, find_answer, labels_of
from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt, Sample

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


async def exact_match(prompt: Prompt, sample: Sample) -> float:
    """1 if the response ended by itself and is the label, up to white space around it; else 0.

    A response that was cut at ``--rollout-max-response-len`` is never right: a model that forgets to stop
    must not be paid. Raises RewardError when the prompt has no label.
    """
    labels = [label.strip() for label in labels_of(prompt)]
    return float(sample.finish_reason == "stop" and sample.text.strip() in labels)


async def f1(prompt: Prompt, sample: Sample) -> float:
    """Harmonic mean of precision and recall over words of the marked answer, or of everything without one; 0 to 1. The
    best of several labels counts. As in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    answer = find_answer(sample.text)
    text = answer.text if answer.mark in ("box", "tags", "hashes") else answer_part(sample.text)
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


async def format_reward(workers: WorkerPool, pattern: str, prompt: Prompt, sample: Sample) -> float:
    """``format``: 1 if the whole response matches ``--rm-format``, up to white space around it, else 0.

    ``pattern``: a regular expression whose dots match line ends too.
    """
    return float(await workers.call(matches, pattern, sample.text.strip()))


def matches(pattern: str, text: str) -> bool:
    """Match in the worker, since some patterns never finish on some texts."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None
