"""Data of questions to search for and of programs to write: ``python -m examples.tasks.prepare DATASET OUTPUT
[--source FILE]``.

Rows of questions are what ``--rm-type f1`` takes: id, prompt, label. Rows of programs have their tests in ``metadata``
(``--metadata-key metadata --label-key none --rm-type code``). Data sets are known by their columns, so ``--source`` may
be any copy of them, .parquet or .jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.math.prepare import EMPTY, DataError, DataSet, Row, each_once, prepare

SEARCH_FIRST = "Search until you know the answer. Then reply with the answer alone, as short as it can be."
WRITE_PROGRAM = "Write it in Python, in one block that begins with ```python. It has to pass tests such as this one:"
READ_AND_PRINT = "Write a program in Python that reads the input and prints the output, in one block of ```python."

DATA_SETS = {
    "hotpotqa": DataSet("PeterJinGo/nq_hotpotqa_train", "train.parquet"),
    "hotpotqa-test": DataSet("PeterJinGo/nq_hotpotqa_train", "test.parquet"),
    "mbpp": DataSet("google-research-datasets/mbpp", "full/train-00000-of-00001.parquet"),
    "mbpp-test": DataSet("google-research-datasets/mbpp", "full/test-00000-of-00001.parquet"),
}


def read(row: Row) -> tuple[str, dict[str, Any]]:
    """Prompt, and the columns beside it. Raises DataError for a row of another shape."""
    columns = row.keys()
    if "question" in columns:  # of Natural Questions and HotpotQA
        first, *others = map(str, row["golden_answers"] if "golden_answers" in columns else [row["answer"]])
        return _filled(row["question"], SEARCH_FIRST), {"label": [first, *others] if others else first}
    if {"text", "test_list"} <= columns:  # of MBPP: statements that are run after the program
        tests = [*filter(None, [row.get("test_setup_code")]), *row["test_list"]]
        return _filled(row["text"], f"{WRITE_PROGRAM}\n\n{tests[-1]}"), {"metadata": {"tests": tests}}
    if {"prompt", "reward_model"} <= columns:  # verl's shape, with inputs and outputs as JSON
        truth = row["reward_model"]["ground_truth"]
        tests = json.loads(truth) if isinstance(truth, str) else truth
        prompt = row["prompt"] if isinstance(row["prompt"], str) else str(row["prompt"][-1]["content"])
        return _filled(prompt, READ_AND_PRINT), {
            "metadata": {"tests": {name: list(tests[name]) for name in ("inputs", "outputs")}}
        }
    raise DataError(f"its columns {', '.join(columns)} are of no data set that is known here")


def _filled(question: str, instruction: str) -> str:
    if not question.strip():
        raise DataError(EMPTY)
    return f"{question.strip()}\n\n{instruction}"


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows for ``--prompt-data``. Raises DataError naming file and row."""
    return each_once(file, read)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.tasks.prepare", description=__doc__)
    return prepare(arguments, parser, DATA_SETS, rows)


if __name__ == "__main__":
    sys.exit(main())
