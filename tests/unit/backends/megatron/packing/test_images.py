"""Images of micro-batches: which samples they belong to, and that nothing else passes for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from miles_async.backends.megatron.packing.images import images_of
from miles_async.backends.megatron.packing.pack import PackLayout, pack_sequences
from miles_async.errors import ContractViolation
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import Picture

IMAGE = 60


class OneRowPerPatch:
    merge_size = 2

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
        return 4 * width

    def __call__(self, images: Sequence[Any], *, return_tensors: str) -> dict[str, np.ndarray]:
        return {"image_grid_thw": np.array([[1, image.height, image.width] for image in images])}


PROCESSOR = PictureProcessor(processor=OneRowPerPatch(), image_token=IMAGE, video_token=IMAGE + 1)


def picture(width: int) -> Picture:
    """It has as many tokens as it is wide."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, 1)).save(file, "PNG")
    return Picture(content=file.getvalue(), digest=str(width), width=width, height=1)


TOKENS = np.array([1, IMAGE, IMAGE, 2, 3, IMAGE, 4, 5], np.int32)
OFFSETS = np.array([0, 4, 5, 8])


def test_images_come_in_the_order_of_their_tokens():
    images = images_of(TOKENS, OFFSETS, [(picture(2),), (), (picture(1),)], PROCESSOR)
    assert images is not None
    grid = images.arguments(torch.device("cpu"))["image_grid_thw"]
    assert grid.tolist() == [[1, 1, 2], [1, 1, 1]]


@pytest.mark.parametrize(
    "pictures",
    [
        [(picture(1),), (), (picture(2),)],  # of each other
        [(picture(2),), (), ()],
        [(picture(2),), (picture(1),), ()],
        (),
    ],
)
def test_tokens_and_images_that_differ_are_refused(pictures: list[tuple[Picture, ...]]):
    with pytest.raises(ContractViolation, match=r"expected \d tokens of \d images in a sample of \d tokens, found \d"):
        images_of(TOKENS, OFFSETS, pictures, PROCESSOR)


def test_texts_have_none():
    text = np.array([1, 2, 3], np.int32)
    assert images_of(text, np.array([0, 3]), (), PROCESSOR) is None
    assert images_of(text, np.array([0, 3]), [()], PROCESSOR) is None
    assert images_of(text[:0], np.array([0]), (), PROCESSOR) is None
    assert images_of(TOKENS, OFFSETS, (), None) is None  # a text model may have any token


def test_a_text_model_gets_no_images():
    with pytest.raises(ContractViolation, match="which the model does not read"):
        images_of(TOKENS, OFFSETS, [(picture(2),), (), (picture(1),)], None)


def test_a_token_of_a_video_is_refused():
    with pytest.raises(ContractViolation, match=f"without videos, found token {IMAGE + 1}"):
        images_of(np.array([1, IMAGE + 1, 2], np.int32), np.array([0, 3]), (), PROCESSOR)


@pytest.mark.parametrize("end", [IMAGE, IMAGE + 1])
def test_a_sample_may_end_at_a_placeholder_which_is_scored_and_not_read(end: int):
    sequences = [[1, IMAGE, IMAGE, 2, end], [3, 4]]
    layout = PackLayout(pictures=PROCESSOR)
    packed = pack_sequences(sequences, layout, torch.device("cpu"), [(picture(2),), ()])
    assert packed.images is not None
    assert packed.tokens[0].tolist() == [1, IMAGE, IMAGE, 2, 0, 3, 0]
    assert packed.labels.tolist() == [IMAGE, IMAGE, 2, end, 4]
