"""The image processor of a vision-language model: how many tokens an image is, and what the model reads of it.

The model's own processor in Hugging Face's format decides both. Which tensors it makes is left to it and the model;
their first dimension is assumed to count patches or images, so that samples can be concatenated.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from miles_async.arguments.model_files import read_json
from miles_async.errors import ConfigurationError, TrajectoryError
from miles_async.types import Picture
from miles_async.types.pictures import content_of_url, digest_of

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 2**26  # of an image that an agent sends; decoded it takes three times as many bytes

KEPT_BYTES = 2**28  # of model inputs of recent images: the samples of a group have the same images

PixelInputs = Mapping[str, np.ndarray]
"""Argument of the model → array, such as pixel_values [patches, values] and image_grid_thw [images, 3]."""


class ImageProcessor(Protocol):
    """The part of transformers' image processors that is used."""

    merge_size: int

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int: ...

    def __call__(self, images: Sequence[object], *, return_tensors: str) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureProcessor:
    """Turns images into tokens of a prompt, and into the arguments of a model."""

    processor: ImageProcessor
    image_token: int  # id of the token that stands for a part of an image
    video_token: int | None = None  # token of videos, which nothing here reads; None: the model has none
    kept_bytes: int = KEPT_BYTES
    _kept: OrderedDict[str, PixelInputs] = field(default_factory=OrderedDict)  # by digest, latest use last

    @property
    def placeholders(self) -> frozenset[int]:
        """Tokens in whose place the model reads something else. In a text they have no meaning."""
        return frozenset(token for token in (self.image_token, self.video_token) if token is not None)

    def tokens(self, width: int, height: int) -> int:
        """Number of tokens of an image of so many pixels."""
        patches = self.processor.get_number_of_image_patches(height, width, {})
        return int(patches) // self.processor.merge_size**2

    def expand(self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Repeat the token that the chat template wrote for each image as often as its image has tokens.

        ``sizes``: width and height of each image, in the order of the prompt. Raises TrajectoryError if the prompt has
        another number of such tokens.
        """
        found = sum(token == self.image_token for token in token_ids)
        if found != len(sizes):
            raise TrajectoryError(
                f"expected the chat template to write one token for each of {len(sizes)} images, found {found} of them "
                f"(token {self.image_token}); the text of a prompt must not have the name of that token"
            )
        if self.video_token is not None and self.video_token in token_ids:
            raise TrajectoryError(f"expected a prompt without videos, found token {self.video_token}")
        counts = iter([self.tokens(width, height) for width, height in sizes])
        expanded: list[int] = []
        for token in token_ids:
            expanded += [token] * (next(counts) if token == self.image_token else 1)
        return tuple(expanded)

    def read(self, url: str, known: Mapping[str, Picture]) -> Picture:
        """Read the image of a ``data:`` URL and check all of it, unless its digest is ``known``.

        Raises TrajectoryError.
        """
        try:
            content = content_of_url(url)
        except ValueError as error:
            raise TrajectoryError(
                "expected an image as data:image/...;base64, followed by the image in base64, since nothing is "
                f"downloaded: {error}"
            ) from None
        digest = digest_of(content)
        if digest in known:
            return known[digest]
        width, height = _decoded(content, most_pixels=MOST_PIXELS).size
        return Picture(content=content, digest=digest, width=width, height=height)

    def inputs(self, pictures: Sequence[Picture]) -> PixelInputs:
        """Make the model's arguments of the images: all of them, in this order. Raises TrajectoryError for one that
        cannot be decoded.
        """
        parts = [self._inputs(picture) for picture in pictures]
        return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def _inputs(self, picture: Picture) -> PixelInputs:
        made = self._kept.pop(picture.digest, None)
        if made is None:
            made = dict(self.processor(images=[_decoded(picture.content)], return_tensors="np"))
        self._kept[picture.digest] = made
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > self.kept_bytes:
            self._kept.popitem(last=False)
        return made


@lru_cache(maxsize=4)
def load_picture_processor(directory: Path) -> PictureProcessor | None:
    """Load the processor of the model in ``directory``, once per process, from local files only.

    None: the model reads no images. Raises ConfigurationError if it does, and there is no usable processor.
    """
    config = read_json(directory / "config.json")
    if "vision_config" not in config:
        return None
    if (image_token := config.get("image_token_id")) is None:
        raise ConfigurationError(
            f"--hf-checkpoint {directory}: config.json has a vision_config, so the model reads images; expected "
            "image_token_id, the token that stands for a part of an image, found none"
        )
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigurationError(
            f"--hf-checkpoint {directory}: the model reads images, and there is no usable processor for them "
            f"(preprocessor_config.json): {error}"
        ) from error
    if not hasattr(processor, "get_number_of_image_patches") or not hasattr(processor, "merge_size"):
        raise ConfigurationError(
            f"--hf-checkpoint {directory}: expected an image processor that tells the number of patches of an image, "
            f"as Qwen's do, found {type(processor).__name__}"
        )
    return PictureProcessor(processor=processor, image_token=int(image_token), video_token=config.get("video_token_id"))


def _decoded(content: bytes, most_pixels: float = math.inf) -> Image.Image:
    """Raises TrajectoryError for content that is not a whole image, or has more pixels."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content))
        if image.width * image.height <= most_pixels:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise TrajectoryError(f"expected an image, found {len(content)} bytes that are not one: {error}") from error
    raise TrajectoryError(
        f"expected an image of at most {most_pixels:,} pixels, found one of {image.width} × {image.height}"
    )


def _bytes(inputs: PixelInputs) -> int:
    return sum(array.nbytes for array in inputs.values())
