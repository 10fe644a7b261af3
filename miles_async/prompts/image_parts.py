"""Messages with images: from data sets' forms to the form that chat templates render.

A data set writes an image as a part of a message's content, or as the text ``<image>`` in it, to which the next image
of a column belongs (``--multimodal-keys``, as in slime). Either becomes a part ``{"type": "image"}``, and the images
are apart from the messages, in the order of these parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from miles_async.errors import ConfigurationError, DataError
from miles_async.types import JsonObject

PLACEHOLDER = "<image>"
IMAGE = {"type": "image"}

_PARTS = re.compile(f"({re.escape(PLACEHOLDER)})")


def image_key(multimodal_keys: str | None) -> str | None:
    """Column of ``--multimodal-keys``. Raises ConfigurationError.

    >>> image_key('{"image": "images"}')
    'images'
    """
    if multimodal_keys is None:
        return None
    try:
        keys = msgspec.json.decode(multimodal_keys, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f'--multimodal-keys: expected JSON such as {{"image": "images"}}, found {multimodal_keys}: {error}'
        ) from None
    if others := sorted(set(keys) - {"image"}):
        raise ConfigurationError(f"--multimodal-keys: {', '.join(others)} cannot be read, only images: image")
    return keys.get("image")


def separate(
    content: str | Sequence[object], column: Sequence[object] | None
) -> tuple[str | list[object], list[object]]:
    """Separate the images from a prompt: (a text or messages with image parts, the images).

    ``content``: of ``--input-key``, unchecked but for what has images. ``column``: the row's images; None: it has no
    such column, and ``<image>`` is a text like any other. A text with images becomes a message of the user.

    Raises DataError, without location, for a part that is neither text nor image, and unless every image of the
    column is used once.
    """
    rest = iter(column or ())
    found: list[object] = []
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    separated: list[object] = []
    for message in messages:
        inner = message.get("content") if isinstance(message, Mapping) else None
        parts = list(_parts(inner, rest if column is not None else None))
        if not any(part is not None for _, part in parts):
            separated.append(message)
            continue
        found += [part for _, part in parts if part is not None]
        assert isinstance(message, Mapping), "parts belong to a message's content"
        separated.append({**message, "content": [dict(shown) for shown, _ in parts]})
    if left := len(list(rest)):
        count = len(column or ())
        places = count - left
        raise DataError(f"{count} images in the column (--multimodal-keys), and the prompt has places for {places}")
    if isinstance(content, str) and not found:
        return content, []
    return separated, found


def _parts(content: object, column: Iterator[object] | None) -> Iterator[tuple[JsonObject, object]]:
    """(part as a template renders it, the image or None) of a message's content."""
    if isinstance(content, str):
        texts = [content] if column is None else _PARTS.split(content)
        for text in texts:
            if column is not None and text == PLACEHOLDER:
                yield IMAGE, _next(column)
            elif text:
                yield {"type": "text", "text": text}, None
    elif isinstance(content, list):
        for part in content:
            yield from _part(part, column)


def _part(part: object, column: Iterator[object] | None) -> Iterator[tuple[JsonObject, object]]:
    if not isinstance(part, Mapping):
        yield {"type": type(part).__name__}, None  # refused where messages are checked
        return
    kind = part.get("type")
    if kind in ("image", "image_url"):
        image = part.get(kind)
        if isinstance(image, Mapping) and "url" in image:
            image = image["url"]
        yield IMAGE, image if image is not None else _next(column)
    elif isinstance(part.get("text"), str):
        yield from _parts(part["text"], column)
    else:
        yield {"type": str(kind)}, None  # refused there, too


def _next(column: Iterator[object] | None) -> object:
    image = next(column, None) if column is not None else None
    if image is None:
        raise DataError(
            "the prompt has a place for an image, and no image is left for it in the row: give the column with images "
            '(--multimodal-keys \'{"image": "images"}\')'
        )
    return image
