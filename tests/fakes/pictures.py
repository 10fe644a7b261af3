"""Small images, and how many tokens they are: one for each pixel."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import Picture
from miles_async.types.pictures import digest_of


def picture(width: int = 2, height: int = 1, color: str = "red") -> Picture:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return Picture(content=file.getvalue(), digest=digest_of(file.getvalue()), width=width, height=height)


class OnePerPixel:
    """An image processor of which each pixel is a patch, and a token."""

    merge_size = 1

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
        return height * width

    def __call__(self, images: Sequence[object], *, return_tensors: str) -> Mapping[str, np.ndarray]:
        return {"pixel_values": np.concatenate([np.asarray(image).reshape(-1, 3) for image in images])}


def picture_processor(chat: ChatTemplate) -> PictureProcessor:
    image, video = chat.tokenize("<|image_pad|><|video_pad|>")
    return PictureProcessor(processor=OnePerPixel(), image_token=image, video_token=video)
