"""Files of a Hugging Face model next to its weights, which an export copies from its source byte by byte.

The bridge would save transformers' rewritten versions, and a tokenizer even if there was none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MOST_BYTES = 1 << 28  # of one file: the largest vocabularies have 40 MB, and what is larger is weights by another name
_WEIGHTS = frozenset(
    f".{suffix}" for suffix in "safetensors bin pt pth ckpt gguf ggml h5 msgpack npz onnx onnx_data ot pkl".split()
)
_OWN = frozenset({"config.json", "README.md"})  # written for the export; a text about the source


def copy_companions(source: Path, target: Path) -> None:
    """Copy everything from ``source`` that is not weights, an index of weights, hidden, or larger than ``MOST_BYTES``.

    Folders are copied as well (``additional_chat_templates``), but for those with weights: these hold an adapter, or
    another copy of the model (``original``, ``onnx``). Raises OSError.
    """
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in _OWN or target.is_relative_to(path):
            continue
        files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        if any(map(_holds_weights, files)):
            continue
        for file in files:
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)


def _holds_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json") or file.stat().st_size > MOST_BYTES
