"""Code that a model directory brings for its tokenizer (``auto_map``). It runs only with ``--trust-remote-code``."""

from __future__ import annotations

import hashlib
from pathlib import Path

from miles_async.arguments.model_files import read_json
from miles_async.errors import ConfigurationError


def check_code(path: Path, *, trusted: bool) -> bool:
    """Return whether a tokenizer names its own code. Raises ConfigurationError if it is trusted and missing.

    Without trust a class of transformers takes its place if there is one.
    """
    references = _references(path, "tokenizer_config.json", "AutoTokenizer")
    named = [("tokenizer_config.json", reference) for reference in references]
    # With trust, transformers and engines look there as well.
    for part in ("AutoTokenizer", "AutoConfig"):
        named += [("config.json", reference) for reference in _references(path, "config.json", part)]
    for file, reference in named:
        if trusted and "--" in reference:
            raise ConfigurationError(
                f"--hf-checkpoint {path}: {file} names {reference}, code of another repository, and nothing is "
                "downloaded: copy its files into the directory, and leave the name in front of -- out"
            )
        if trusted and not (path / f"{reference.rpartition('.')[0]}.py").is_file():
            raise ConfigurationError(f"--hf-checkpoint {path}: {file} names {reference}, and there is no such file")
    return bool(references)


def _references(path: Path, file: str, part: str) -> list[str]:
    named = read_json(path / file).get("auto_map")
    classes = named.get(part) if isinstance(named, dict) else named if part == "AutoTokenizer" else None
    return [str(reference) for reference in (classes if isinstance(classes, list) else [classes]) if reference]


def digests(path: Path) -> dict[str, str]:
    """Python files of a model directory, all of which its tokenizer may import: name → SHA-256, the first 16 digits."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in sorted(path.glob("*.py"))}


def refusal(path: Path) -> str:
    """Why a tokenizer that needs its own code is not loaded, and which flag does."""
    files = ", ".join(f"{name} (sha256 {digest})" for name, digest in digests(path).items()) or "none there"
    return (
        f"--hf-checkpoint {path}: its tokenizer needs code of its own, which is not run unasked. Read its Python files "
        f"({files}), then add --trust-remote-code"
    )
