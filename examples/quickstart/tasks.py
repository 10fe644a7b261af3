"""The two tasks, as records: what is asked, what is right, how much data, and how the model is warm-started.

Why RL can learn them: the warm start teaches two well-formed behaviours, the task and a plain copy of the
digits, and RL finds out which of the two the verifier pays for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SPLIT_SEED = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One question of a task: ``Example(prompt="rev 52814", digits="52814", label="41825")``."""

    prompt: str
    digits: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Qwen3 dimensions; embeddings are tied."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    ffn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Supervised training before RL: ``solved_share`` of the targets solve the task, the rest copy."""

    solved_share: float
    steps: int
    batch_size: int
    lr: float
    first_seed: int  # later ones are tried while the result is not accepted
    accepted_reward: tuple[float, float]  # sampled; below RL finds too little to go by, above nothing to learn


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A question about a string of digits that a program can check."""

    name: str
    word: str  # the prompt is "<word> <digits>"
    length: int  # number of digits
    solve: Callable[[str], str]
    train_size: int
    test_size: int
    model: ModelSize
    warm_start: WarmStart

    @property
    def max_response_length(self) -> int:
        """Tokens RL may sample: the digits, EOS, and one more so that a missing EOS shows."""
        return self.length + 2

    def example(self, digits: str) -> Example:
        return Example(prompt=f"{self.word} {digits}", digits=digits, label=self.solve(digits))

    def split(self) -> tuple[list[Example], list[Example]]:
        """Training and test examples: disjoint, shuffled, the same on every machine."""
        numbers = random.Random(SPLIT_SEED).sample(range(10**self.length), self.train_size + self.test_size)
        examples = [self.example(f"{number:0{self.length}d}") for number in numbers]
        return examples[self.test_size :], examples[: self.test_size]


REVERSE = Task(
    name="reverse",
    word="rev",
    length=5,
    solve=lambda digits: digits[::-1],
    train_size=20_000,
    test_size=256,
    model=ModelSize(hidden=128, layers=2, heads=4, key_value_heads=2, head_dim=32, ffn=256),
    warm_start=WarmStart(
        solved_share=1 / 2, steps=200, batch_size=64, lr=2e-3, first_seed=7, accepted_reward=(0.12, 0.18)
    ),
)

SORT = Task(
    name="sort",
    word="sort",
    length=4,
    solve=lambda digits: "".join(sorted(digits)),
    train_size=9_744,
    test_size=256,
    model=ModelSize(hidden=64, layers=2, heads=4, key_value_heads=2, head_dim=16, ffn=128),
    warm_start=WarmStart(
        solved_share=1 / 3, steps=250, batch_size=128, lr=3e-3, first_seed=0, accepted_reward=(0.20, 0.30)
    ),
)

TASKS = {task.name: task for task in (REVERSE, SORT)}


def write_jsonl(examples: Iterable[Example], path: Path) -> None:
    """One ``{"prompt": [{"role": "user", "content": ...}], "label": ...}`` per line."""
    rows = ({"prompt": [{"role": "user", "content": e.prompt}], "label": e.label} for e in examples)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")  # renamed when whole: an interruption leaves no short data set
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unfinished.replace(path)
