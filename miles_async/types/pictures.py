"""Images of prompts and conversations."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode

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


_URL = re.compile(r"data:image/[\w.+-]+;base64,(?P<content>.*)", re.DOTALL)
_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}  # by their first bytes


def data_url(picture: Picture) -> str:
    """The image as a ``data:`` URL."""
    kind = next((kind for begin, kind in _KINDS.items() if picture.content.startswith(begin)), "png")
    return f"data:image/{kind};base64,{b64encode(picture.content).decode()}"


def content_of_url(url: str) -> bytes:
    """The content of an image that is a ``data:`` URL. Raises ValueError that says how the URL begins otherwise."""
    if (found := _URL.fullmatch(url)) is None:
        raise ValueError("it begins with " + url[:40])
    return b64decode(found["content"], validate=True)


def digest_of(content: bytes) -> str:
    """blake2b, hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
