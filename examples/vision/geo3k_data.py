"""Geometry problems as prompt files: ``python -m examples.vision.geo3k_data geo3k|geo3k-test OUTPUT [--source FILE]``.

Rows have the prompt with ``<image>`` for a figure, the figures as ``data:`` URLs in ``images``, and the label.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.math.prepare import INSTRUCTION, DataError, DataSet, Row, prepare, read_rows
from miles_async.types import Picture
from miles_async.types.pictures import data_url

REPOSITORY = "hiyouga/geometry3k"
DATA_SETS = {
    "geo3k": DataSet(REPOSITORY, "data/train-00000-of-00001.parquet"),
    "geo3k-test": DataSet(REPOSITORY, "data/test-00000-of-00001.parquet"),
}


def prompts(file: Path) -> Iterator[dict[str, Any]]:
    """Rows for ``--prompt-data``. Raises DataError naming file and row."""
    for number, row in read_rows(file):
        try:
            yield _prompt(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{file}, row {number}: it is not what its columns say ({error!r})") from None


def _prompt(row: Row) -> dict[str, Any]:
    question, images = row["problem"].strip(), [_url(image) for image in row["images"]]
    if "<image>" not in question:
        question = "<image>" * len(images) + question
    content = f"{question}\n\n{INSTRUCTION}"
    return {"prompt": [{"role": "user", "content": content}], "images": images, "label": row["answer"]}


def _url(image: Any) -> str:
    """A figure as the data set has it, as an object with bytes, or as copies of it have it, as a URL."""
    return image if isinstance(image, str) else data_url(Picture(content=image["bytes"], digest="", width=0, height=0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.vision.geo3k_data", description=__doc__)
    return prepare(arguments, parser, DATA_SETS, prompts)


if __name__ == "__main__":
    sys.exit(main())
