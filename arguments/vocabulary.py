"""Vocabularies of Hugging Face model directories, read from their files: no tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from miles_async.arguments.model_files import read_json

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""Files of which one at least defines which token an id stands for."""


def difference(student: Path, teacher: Path) -> str | None:
    """Why ids of the student's tokenizer would mean something else to the teacher; None if they don't.

    The teacher's may have more tokens. Other files than tokenizer.json are compared as a whole.
    """
    known, given = _tokens(student), _tokens(teacher)
    if known and given:
        for token, number in known.items():
            if given.get(token) != number:
                there = "no such token" if token not in given else f"id {given[token]}"
                return f"expected id {number} for {token!r} in {teacher / FILES[0]}, found {there}"
        return None
    for name in FILES[1:]:
        ours, theirs = _content(student / name), _content(teacher / name)
        if ours is not None and theirs is not None:
            return None if ours == theirs else f"{name} differs between {student} and {teacher}"
    return f"expected one of {', '.join(FILES)} in both {student} and {teacher} to compare, found none"


def _tokens(directory: Path) -> Mapping[str, int]:
    """Token → id, by tokenizer.json; empty if there is none."""
    content = read_json(directory / FILES[0])
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: [token, score] by id
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
