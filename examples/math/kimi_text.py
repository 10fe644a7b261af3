"""The text model of Kimi-K2.5: ``python -m examples.math.kimi_text WHOLE TEXT``.

``WHOLE`` is a checkpoint in bf16, as miles' conversion from INT4 writes. ``TEXT`` gets weights and config of the text
model, whose architecture is Kimi-K2's. Copy tokenizer and code next to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

PREFIX = "language_model."


def write_text_model(whole: Path, text: Path) -> None:
    """Write the text model of the checkpoint ``whole`` to ``text``, a new directory, file by file."""
    text.mkdir()
    places: dict[str, str] = {}
    for file in sorted(whole.glob("*.safetensors")):
        tensors = {
            name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items() if name.startswith(PREFIX)
        }
        save_file(tensors, text / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    config = json.loads((whole / "config.json").read_text())["text_config"] | {"model_type": "kimi_k2"}
    config.pop("quantization_config", None)
    (text / "config.json").write_text(json.dumps(config))
    (text / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.math.kimi_text", allow_abbrev=False)
    parser.add_argument("whole", type=Path, metavar="WHOLE", help="the checkpoint, in bf16")
    parser.add_argument("text", type=Path, metavar="TEXT", help="new directory for the text model")
    parsed = parser.parse_args(words)
    write_text_model(parsed.whole, parsed.text)


if __name__ == "__main__":
    main()
