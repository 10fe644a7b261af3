"""What the model has seen before RL: dialogues in which tools are used, and others in which answers are guessed.

Why RL can learn from there: both behaviours are well formed, and the verifier pays for one of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from examples.quickstart.tokenizer import EOS_ID, VOCABULARY

IDS = {token: i for i, token in enumerate(VOCABULARY)}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """(role, content) per message; calls are written ``<call>...</call>``."""

    messages: tuple[tuple[str, str], ...]

    def tokens(self) -> tuple[list[int], list[bool]]:
        """Token ids as the chat template has them, and which of them the assistant says."""
        ids, said = [IDS["<bos>"]], [False]
        for role, content in self.messages:
            by_assistant = role == "assistant"
            body = _characters(content) + ([EOS_ID] if by_assistant else [])
            ids += [IDS[f"<|{role}|>"], *body]
            said += [False, *[by_assistant] * len(body)]
        return ids, said

    def turns(self) -> list[tuple[list[int], list[int]]]:
        """(what stands before it, what is said) of each turn of the assistant, as token ids."""
        ids, turns = [IDS["<bos>"]], []
        for role, content in self.messages:
            ids.append(IDS[f"<|{role}|>"])
            body = _characters(content)
            if role == "assistant":
                body.append(EOS_ID)
                turns.append(([*ids], body))
            ids += body
        return turns


def _characters(content: str) -> list[int]:
    return [IDS[token] for token in re.findall(r"</?call>|.", content)]


# ------------------------------------------------------------------------------------------------ two tasks
def product_question(a: int, b: int) -> str:
    return f"{a}*{b}=?"


def calculator_dialogue(random_: random.Random, uses_tool: bool) -> Dialogue:
    """``17*23=?``: with the calculator, or guessed."""
    a, b = random_.randrange(10, 100), random_.randrange(10, 100)
    question = ("user", product_question(a, b))
    if not uses_tool:
        return Dialogue((question, ("assistant", str(random_.randrange(100, 10_000)))))
    result = str(a * b)
    return Dialogue(
        (question, ("assistant", f"<call>{a}*{b}</call>"), ("tool", result), ("assistant", result)),
    )


def leader_question(land: str) -> str:
    return f"who leads {land}?"


def town_fact(land: str, town: str) -> str:
    return f"{land} is ruled from {town}"


def leader_fact(town: str, leader: str) -> str:
    return f"{town} is led by {leader}"


def search_dialogue(random_: random.Random, uses_tool: bool) -> Dialogue:
    """Two hops: from a land to the town it is ruled from, and to who leads that; or guessed."""
    land, town, leader, guess = (name(random_) for _ in range(4))
    question = ("user", leader_question(land))
    if not uses_tool:
        return Dialogue((question, ("assistant", guess)))
    return Dialogue(
        (
            question,
            ("assistant", f"<call>{land}</call>"),
            ("tool", town_fact(land, town)),
            ("assistant", f"<call>{town}</call>"),
            ("tool", leader_fact(town, leader)),
            ("assistant", leader),
        )
    )


def name(random_: random.Random) -> str:
    """Three letters, such as ``kib``."""
    return random_.choice("bdfgklmnprstv") + random_.choice("aeiou") + random_.choice("bdfgklmnprstv")


MakeDialogue = Callable[[random.Random, bool], Dialogue]
TASKS: tuple[MakeDialogue, ...] = (calculator_dialogue, search_dialogue)
