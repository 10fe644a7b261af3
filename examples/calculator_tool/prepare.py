"""Writes the questions: ``train.jsonl`` and ``test.jsonl`` in ``data/``. From the repository root:

python -m examples.calculator_tool.prepare
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from examples.quickstart.tasks import Example, write_jsonl
from examples.tool_model.dialogues import product_question

DATA = Path(__file__).parent / "data"
TEST_SIZE = 128
SEED = 1234


def questions() -> list[Example]:
    """All products of two numbers of two digits, shuffled, the same on every machine."""
    examples = [
        Example(prompt=product_question(a, b), digits="", label=str(a * b))
        for a in range(10, 100)
        for b in range(10, 100)
    ]
    random.Random(SEED).shuffle(examples)
    return examples


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Questions for the calculator.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=DATA, help="folder for train.jsonl and test.jsonl")
    output = parser.parse_args(arguments).output
    examples = questions()
    for name, part in (("test", examples[:TEST_SIZE]), ("train", examples[TEST_SIZE:])):
        if not (output / f"{name}.jsonl").exists():
            write_jsonl(part, output / f"{name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
