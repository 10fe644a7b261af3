"""A ``trajectory.rendering.Decoder`` without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextOfTokens:
    """``decoder_id``: as which it asks engines for text. Their text ends with a full stop, which is left out."""

    decode: Callable[[Sequence[int]], str]
    decoder_id: int | None = None

    def trim(self, text: str) -> str:
        return text.removesuffix(".")
