"""Decode tokens identically in the rollout process and in the engines that it starts."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_STRIDE = 61  # about 2,500 of 150,000 tokens
_PROBE_LAST = 512  # special tokens have the highest ids


def decode_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Decode with all tokens, special ones too. A tokenizer in Rust runs without Python's global lock."""
    backend = _backend(tokenizer)
    if backend is None:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
    (text,) = backend.decode_batch([token_ids], skip_special_tokens=False)  # its ``decode`` holds the lock
    return text


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Hash of the texts of a sample of the vocabulary, equal for tokenizers that decode alike; None for one in Python,
    which may have no text for some ids.
    """
    if _backend(tokenizer) is None:
        return None
    size = len(tokenizer)
    sample = [*range(0, size, _PROBE_STRIDE), *range(max(0, size - _PROBE_LAST), size)]
    return zlib.crc32(decode_tokens(tokenizer, sample).encode())


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """The tokenizer in Rust, if it alone makes the text."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
