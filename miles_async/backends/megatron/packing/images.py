"""Images of packed samples. A micro-batch holds them encoded; pixels exist while the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from miles_async.errors import ContractViolation
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import Int32, Int64, Picture


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a micro-batch, in the order of their tokens."""

    pictures: tuple[Picture, ...]  # at least one
    processor: PictureProcessor

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """Make the arguments of the model's forward pass, such as pixel_values and image_grid_thw."""
        return {
            name: torch.tensor(array, device=device) for name, array in self.processor.inputs(self.pictures).items()
        }


def images_of(
    tokens: Int32 | Int64,
    offsets: Int64,
    pictures: Sequence[tuple[Picture, ...]] | None,
    processor: PictureProcessor | None,
) -> Images | None:
    """Collect the images of the samples in ``tokens``, [N]; ``offsets``: [S + 1], ``pictures``: [S] or None.

    Raises ContractViolation unless every sample has as many image tokens as its images have, and no token of a video:
    else the model would read one sample's image in another. Last tokens, which nothing follows, don't count.
    """
    pictures = pictures or [()] * (len(offsets) - 1)
    if processor is None:
        if any(pictures):
            raise ContractViolation("expected samples without images, which the model does not read; found some")
        return None
    read = np.ones(len(tokens), dtype=bool)
    read[offsets[1:] - 1] = False
    if processor.video_token is not None and (tokens[read] == processor.video_token).any():
        raise ContractViolation(f"expected samples without videos, found token {processor.video_token}")
    found = np.zeros(0, np.int64)
    if len(tokens):
        found = np.add.reduceat((read & (tokens == processor.image_token)).astype(np.int64), offsets[:-1])
    for sample, ((start, end), count) in enumerate(zip(pairwise(offsets.tolist()), found, strict=True)):
        own = pictures[sample]
        expected = sum(processor.tokens(picture.width, picture.height) for picture in own)
        if expected != count:
            raise ContractViolation(
                f"expected {expected} tokens of {len(own)} images in a sample of {end - start} tokens, found {count} "
                f"(token {processor.image_token})"
            )
    flat = tuple(picture for own in pictures for picture in own)
    return Images(flat, processor) if flat else None
