"""The task: sums of a digit and a number from 1 to 20, and what an answer is worth."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations_with_replacement

from miles_async.types import JsonObject, Prompt, Sample

LARGEST = 20
HELD_OUT_PAIRS = 34  # of 144; 68 questions or a few less, as both orders of a pair are held out together
SEED = 1234
SOLVED = ((2, 3), (6, 12), (9, 19))  # none is held out; every prompt begins with them


def ask(a: int, b: int) -> str:
    """The question in words, as the user of the chat asks it."""
    return f"What is {a} + {b}? Reply with only the number."


@dataclass(frozen=True, slots=True)
class Question:
    """A sum to ask for."""

    a: int
    b: int
    held_out: bool

    def row(self) -> JsonObject:
        """Row of the prompt data.

        >>> Question(17, 5, held_out=False).row()["prompt"][-3:]
        [{'role': 'user', 'content': 'What is 9 + 19? Reply with only the number.'},
         {'role': 'assistant', 'content': '28'},
         {'role': 'user', 'content': 'What is 17 + 5? Reply with only the number.'}]
        """
        solved = [
            {"role": role, "content": content}
            for a, b in SOLVED
            for role, content in (("user", ask(a, b)), ("assistant", str(a + b)))
        ]
        return {
            "prompt": [*solved, {"role": "user", "content": ask(self.a, self.b)}],
            "label": str(self.a + self.b),
            "metadata": {"held_out": self.held_out},
        }


def split() -> tuple[list[Question], list[Question]]:
    """Training and test questions, shuffled, the same on every machine. No sum of the test is in training, in either
    order.
    """
    chance = random.Random(SEED)
    pairs = [
        (a, b) for a, b in combinations_with_replacement(range(1, LARGEST + 1), 2) if a < 10
    ]  # a is the smaller one
    chance.shuffle(pairs)
    train, test = _questions(pairs[HELD_OUT_PAIRS:], held_out=False), _questions(pairs[:HELD_OUT_PAIRS], held_out=True)
    chance.shuffle(train)
    chance.shuffle(test)
    return train, test


def _questions(pairs: list[tuple[int, int]], *, held_out: bool) -> list[Question]:
    return [Question(*numbers, held_out) for a, b in pairs for numbers in sorted({(a, b), (b, a)})]


async def worth(prompt: Prompt, sample: Sample) -> float:  # Reward, see miles_async/api/
    """1 for the sum and nothing else; 0.1 for another number, and up to 0.4 more for its digits that are right, if it
    has as many as the sum. Few samples of the untrained model are right, and rewards that are all equal teach nothing.

    Of answers to held-out questions only right ones count, so that their mean is the accuracy.
    """
    text = sample.text.strip()
    if sample.finish_reason != "stop":
        return 0.0
    if text == prompt.label:
        return 1.0
    if prompt.metadata["held_out"] or not (text.isdecimal() and text.isascii()):
        return 0.0
    if len(text) != len(prompt.label):
        return 0.1
    return 0.1 + 0.4 * sum(a == b for a, b in zip(text, prompt.label, strict=True)) / len(text)
