"""Images of packed samples. A micro-batch holds them encoded; pixels exist while the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from miles_async.errors import ContractViolation
from miles_async.runtime.picture_processor import PictureProcessor, PixelInputs
from miles_async.types import Int32, Int64, Picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a micro-batch of T positions, in the order of their tokens, if it has any."""

    pictures: tuple[Picture, ...]
    processor: PictureProcessor
    positions: Int64  # [T], of each token in its sample
    boundaries: Int64  # of the samples in [0, T]
    places: Int64  # [K]: where tokens of images are, in [0, T)
    held: Int64  # [T / CP]: the positions of this rank

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """Make the arguments of the model's forward pass that depend on images: with some, pixel_values and
        image_grid_thw.
        """
        inputs = self.processor.inputs(self.pictures)
        row_at = np.full(len(self.positions), -1)
        row_at[self.places] = np.arange(len(self.places))
        arrays = {**inputs, "position_ids": self._positions(inputs), "image_rows": row_at[self.held]}
        return {name: torch.tensor(array, device=device) for name, array in arrays.items()}

    def _positions(self, inputs: PixelInputs) -> Int64:
        """Three numbers for each token, [3, 1, T], by which M-RoPE rotates: time, height and width.

        In texts all are the same. A token of an image has its row and column there, and the text after it begins at
        the larger one of the image's sizes (Qwen2-VL, arXiv:2409.12191, section 2.1).
        """
        found = np.tile(self.positions, (3, 1))
        patches = np.asarray(inputs.get("image_grid_thw", np.zeros((0, 3))), np.int64)[:, 1:]
        sizes = patches // self.processor.processor.merge_size
        ends = sizes.prod(1).cumsum()
        if (ends[-1] if len(ends) else 0) != len(self.places):
            raise ContractViolation(f"expected images of {len(self.places)} tokens in all, found {ends.tolist()}")
        for end, (height, width) in zip(ends.tolist(), sizes.tolist(), strict=True):
            tokens = height * width
            first = self.places[end - tokens]
            rows, columns = np.divmod(np.arange(tokens), width)
            found[:, first : first + tokens] = found[0, first] + np.stack([np.zeros_like(rows), rows, columns])
            sample_end = self.boundaries[np.searchsorted(self.boundaries, first, side="right")]
            found[:, first + tokens : sample_end] -= tokens - max(height, width)
        return found[:, None]


def images_of(
    tokens: Int32 | Int64, offsets: Int64, pictures: Sequence[tuple[Picture, ...]], processor: PictureProcessor | None
) -> tuple[Picture, ...]:
    """Collect the images of the samples in ``tokens``, [N]; ``offsets``: [S + 1], ``pictures``: [S] or empty.

    Raises ContractViolation unless every sample has as many image tokens as its images have, and no token of a video:
    else the model would read one sample's image in another. Last tokens, which nothing follows, don't count.
    """
    pictures = pictures or [()] * (len(offsets) - 1)
    if processor is None:
        if any(pictures):
            raise ContractViolation("expected samples without images, which the model does not read; found some")
        return ()
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
    return tuple(picture for own in pictures for picture in own)
