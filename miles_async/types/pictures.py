"""Images of prompts."""

from __future__ import annotations

import hashlib

import msgspec


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An image as its file has it, encoded: the one form that is kept, sent to engines and given to the trainer.

    Pixels, which take 20 to 100 times as much memory, are made of it where a model reads them
    (``runtime.picture_processor``). A prompt has its pictures in the order of its messages, and its samples refer to
    the same objects, so that a group holds them once.

    >>> picture.digest == digest_of(picture.content)
    True
    """

    content: bytes  # PNG, JPEG or another format that Pillow reads
    digest: str  # of the content; files that differ in a byte are different pictures
    width: int  # pixels, as stored: orientation tags are ignored, as engines do
    height: int


def digest_of(content: bytes) -> str:
    """blake2b, hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
