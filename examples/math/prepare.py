"""Data of mathematical questions as prompt files: ``python -m examples.math.prepare DATASET OUTPUT [--source FILE]``.

Rows are ``{"id": ..., "prompt": [{"role": "user", "content": ...}], "label": ...}``, what ``--prompt-data`` takes with
``--prompt-id-key id --rm-type math``. The data sets' own rows are known by their columns, so ``--source`` may be any
copy of them, .parquet or .jsonl. A question that comes twice (DAPO-Math-17k has each a hundred times) is written once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

INSTRUCTION = "Think step by step, and put your final answer in \\boxed{}."
EMPTY = "its question or its answer is empty"

Row = Mapping[str, Any]


class DataError(Exception):
    """The data cannot be had, or is not what it should be."""


@dataclass(frozen=True)
class DataSet:
    """Where a data set is on huggingface.co."""

    repository: str
    file: str


DATA_SETS = {
    "dapo-math-17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet"),
    "gsm8k": DataSet("openai/gsm8k", "main/train-00000-of-00001.parquet"),
    "gsm8k-test": DataSet("openai/gsm8k", "main/test-00000-of-00001.parquet"),
    "aime-2024": DataSet("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"),
}


def read(row: Row) -> tuple[str, dict[str, Any]]:
    """Prompt of a row of any of the shapes below, and its label. Raises DataError, KeyError, TypeError or IndexError
    for another.
    """
    for columns, of_shape in SHAPES:
        if columns <= row.keys():
            prompt, label = (text.strip() for text in of_shape(row))
            if not (prompt and label):
                raise DataError(EMPTY)
            return prompt, {"label": label}
    raise DataError(f"its columns {', '.join(row)} are of no data set that is known here")


def _content(prompt: Any) -> str:
    """Return the question of a prompt: a text, or messages, the last of which is the user's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _asked(question: str) -> str:
    if not question.strip():
        raise DataError(EMPTY)
    return f"{question.strip()}\n\n{INSTRUCTION}"


def _after_hashes(answer: str) -> str:
    """The number at the end of an answer of GSM8K, ``... #### 1,234``, without commas."""
    _, hashes, number = answer.rpartition("####")
    if not hashes:
        raise DataError("its answer has no ####")
    return number.replace(",", "")


SHAPES: list[tuple[set[str], Callable[[Row], tuple[str, str]]]] = [
    ({"prompt", "reward_model"}, lambda row: (_content(row["prompt"]), str(row["reward_model"]["ground_truth"]))),
    ({"prompt", "label"}, lambda row: (_content(row["prompt"]), str(row["label"]))),
    ({"question", "answer"}, lambda row: (_asked(row["question"]), _after_hashes(row["answer"]))),
    ({"problem", "answer"}, lambda row: (_asked(row["problem"]), str(row["answer"]))),
    ({"Problem", "Answer"}, lambda row: (_asked(row["Problem"]), str(row["Answer"]))),
]
"""Columns that tell a shape, and what its rows hold: DAPO's, slime's and ours, whose prompts say how to answer;
GSM8K's, and AIME's in two spellings, which are bare questions.
"""


def read_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Number, from 1, and row, of a .parquet or .jsonl file. Raises DataError naming file and line."""
    if file.suffix == ".parquet":
        try:
            with pyarrow.parquet.ParquetFile(file) as parquet:
                rows = (row for batch in parquet.iter_batches() for row in batch.to_pylist())
                yield from enumerate(rows, start=1)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file}: {error}") from None
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}:{number}: {error}") from None


def prompts(file: Path) -> Iterator[dict[str, Any]]:
    """Rows for ``--prompt-data``. Raises DataError naming file and row."""
    return each_once(file, read)


def each_once(file: Path, read: Callable[[Row], tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Rows with the id and prompt of each question, once, and the other columns that ``read`` gives. Raises DataError
    naming file and row.
    """
    seen: set[str] = set()
    for number, row in read_rows(file):
        try:
            prompt, rest = read(row)
        except (DataError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            reason = error if isinstance(error, DataError) else f"it is not what its columns say ({error!r})"
            raise DataError(f"{file}, row {number}: {reason}") from None
        if prompt not in seen:
            seen.add(prompt)
            name = hashlib.blake2s(prompt.encode(), digest_size=8).hexdigest()
            yield {"id": name, "prompt": [{"role": "user", "content": prompt}], **rest}


def write(rows: Iterable[dict[str, Any]], output: Path) -> int:
    """Write the whole file or none. Returns the number of rows."""
    output.parent.mkdir(parents=True, exist_ok=True)
    making = output.with_name(f".{output.name}.making")
    try:
        with making.open("w", encoding="utf-8") as file:
            count = sum(1 for row in rows if file.write(json.dumps(row, ensure_ascii=False) + "\n"))
        if not count:
            raise DataError("there is no row in it")
        making.replace(output)
    finally:
        making.unlink(missing_ok=True)
    return count


def fetch(name: str, where: DataSet) -> Path:
    """Fetch a data set from its hub, or find it in the cache. Raises DataError."""
    try:
        return Path(hf_hub_download(where.repository, where.file, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{name}: cannot fetch {where.file} of the data set {where.repository} ({reason}); get it elsewhere and "
            "name it with --source"
        ) from None


def prepare(
    arguments: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    data_sets: Mapping[str, DataSet],
    rows: Callable[[Path], Iterable[dict[str, Any]]],
) -> int:
    """Run a command that writes the ``rows`` of a data set; return its exit status, 2 if they cannot be had or read."""
    parser.add_argument("dataset", choices=data_sets, help="which one to fetch; with --source, only a name")
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--source", type=Path, help="a .parquet or .jsonl file of the data set, instead of fetching it")
    options = parser.parse_args(arguments)
    try:
        count = write(rows(options.source or fetch(options.dataset, data_sets[options.dataset])), options.output)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {count:,} prompts to {options.output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.math.prepare", description=__doc__)
    return prepare(arguments, parser, DATA_SETS, prompts)


if __name__ == "__main__":
    sys.exit(main())
