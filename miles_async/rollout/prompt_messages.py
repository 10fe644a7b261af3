"""The conversation that a prompt begins, for environments and agents."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from miles_async.types import JsonObject, Picture, Prompt
from miles_async.types.pictures import data_url


def conversation(prompt: Prompt, keep: Callable[[Picture], str]) -> list[JsonObject]:
    """The messages of a prompt, with the digests that ``keep`` gives for its images; a source that only has its text
    means a message of the user.
    """
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return _filled(messages, prompt, lambda picture: {"type": "image", "image": keep(picture)})


def with_image_urls(prompt: Prompt) -> Prompt:
    """The prompt whose messages have its images as parts of type ``image_url``, as chat completions want them."""
    if not prompt.pictures:
        return prompt
    messages = _filled(
        prompt.messages, prompt, lambda each: {"type": "image_url", "image_url": {"url": data_url(each)}}
    )
    return replace(prompt, messages=tuple(messages))


def _filled(
    messages: tuple[JsonObject, ...], prompt: Prompt, part_of: Callable[[Picture], JsonObject]
) -> list[JsonObject]:
    pictures = iter(prompt.pictures)

    def filled(part: JsonObject) -> JsonObject:
        return part_of(next(pictures)) if part == {"type": "image"} else part

    return [
        {**message, "content": [*map(filled, content)]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
