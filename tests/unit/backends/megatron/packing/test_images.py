"""Images of micro-batches: which samples they belong to, and that nothing else passes for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_async.backends.megatron.packing.images import images_of
from miles_async.backends.megatron.packing.pack import PackedBatch, PackLayout, pack_sequences
from miles_async.errors import ContractViolation
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import Picture
from tests.fakes.pictures import picture

IMAGE = 60


class TokenPerPixel:
    merge_size = 2

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
        return 4 * height * width

    def __call__(self, images: Sequence[Any], *, return_tensors: str) -> dict[str, np.ndarray]:
        return {"image_grid_thw": np.array([[1, 2 * image.height, 2 * image.width] for image in images])}


PROCESSOR = PictureProcessor(processor=TokenPerPixel(), image_token=IMAGE, video_token=IMAGE + 1)


TOKENS = np.array([1, IMAGE, IMAGE, 2, 3, IMAGE, 4, 5], np.int32)
OFFSETS = np.array([0, 4, 5, 8])


def test_images_come_in_the_order_of_their_tokens():
    two, one = picture(2, 1), picture(1, 1)
    assert images_of(TOKENS, OFFSETS, [(two,), (), (one,)], PROCESSOR) == (two, one)


def rotary_index(tokens: list[int], sizes: list[tuple[int, int]]) -> Tensor:
    """Positions by transformers, of a sample with images of so many columns and rows."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel

    class Model:
        config = Qwen2_5_VLConfig()
        get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids

    grid = torch.tensor([[1, 2 * height, 2 * width] for width, height in sizes]) if sizes else None
    row = torch.tensor([tokens])
    positions, _ = Qwen2_5_VLModel.get_rope_index(Model(), row, (row == IMAGE).int(), grid)  # type: ignore[arg-type]
    return positions[:, 0]


SIZES = [[(2, 3)], [], [(3, 1), (2, 2), (1, 4)], [(1, 1)]]
SEQUENCES = [
    [1, 2, *[IMAGE] * 6, 3, 4],
    [5, 6, 7],
    [*[IMAGE] * 3, 8, *[IMAGE] * 4, 9, *[IMAGE] * 4, 10],
    [11, IMAGE, 12, 13],
]


def packed_images(layout: PackLayout) -> tuple[PackedBatch, dict[str, Tensor]]:
    pictures = [tuple(picture(*size) for size in sizes) for sizes in SIZES]
    packed = pack_sequences(SEQUENCES, layout, torch.device("cpu"), pictures)
    assert packed.images is not None
    return packed, packed.images.arguments(torch.device("cpu"))


def test_positions_of_images_and_of_what_follows_are_those_of_transformers():
    packed, arguments = packed_images(PackLayout(pictures=PROCESSOR, share=4))
    starts = packed.attention.cu_seqlens_q.tolist()
    assert arguments["position_ids"].shape == (3, 1, starts[-1])
    for start, sequence, sizes in zip(starts, SEQUENCES, SIZES, strict=False):
        found = arguments["position_ids"][:, 0, start : start + len(sequence)]
        assert found.tolist() == rotary_index(sequence, sizes).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_knows_which_features_its_tokens_have(ranks: int):
    """Positions are those of all context-parallel ranks, as megatron takes each rank's part of them itself."""
    _, whole = packed_images(PackLayout(pictures=PROCESSOR, context_size=ranks))
    features = []
    for rank in range(ranks):
        packed, arguments = packed_images(PackLayout(pictures=PROCESSOR, context_size=ranks, context_rank=rank))
        rows = arguments["image_rows"]
        assert (rows >= 0).tolist() == (packed.tokens[0] == IMAGE).tolist()
        assert arguments["position_ids"].equal(whole["position_ids"])
        features += rows[rows >= 0].tolist()
    assert sorted(features) == list(range(sum(sequence.count(IMAGE) for sequence in SEQUENCES)))


def test_a_batch_of_texts_has_positions_and_no_images():
    packed = pack_sequences([[1, 2], [3, 4, 5]], PackLayout(pictures=PROCESSOR), torch.device("cpu"))
    assert packed.images is not None
    arguments = packed.images.arguments(torch.device("cpu"))
    assert arguments.keys() == {"position_ids", "image_rows"}
    assert arguments["position_ids"].tolist() == [[[0, 1, 0, 1, 2]]] * 3
    assert arguments["image_rows"].tolist() == [-1] * 5


@pytest.mark.parametrize(
    "pictures",
    [
        [(picture(1, 1),), (), (picture(2, 1),)],  # of each other
        [(picture(2, 1),), (), ()],
        [(picture(2, 1),), (picture(1, 1),), ()],
        (),
    ],
)
def test_tokens_and_images_that_differ_are_refused(pictures: list[tuple[Picture, ...]]):
    with pytest.raises(ContractViolation, match=r"expected \d tokens of \d images in a sample of \d tokens, found \d"):
        images_of(TOKENS, OFFSETS, pictures, PROCESSOR)


def test_texts_have_none():
    text = np.array([1, 2, 3], np.int32)
    assert images_of(text, np.array([0, 3]), (), PROCESSOR) == ()
    assert images_of(text, np.array([0, 3]), [()], PROCESSOR) == ()
    assert images_of(text[:0], np.array([0]), (), PROCESSOR) == ()
    assert images_of(TOKENS, OFFSETS, (), None) == ()  # a text model may have any token


def test_a_text_model_gets_no_images():
    with pytest.raises(ContractViolation, match="which the model does not read"):
        images_of(TOKENS, OFFSETS, [(picture(2, 1),), (), (picture(1, 1),)], None)


def test_a_token_of_a_video_is_refused():
    with pytest.raises(ContractViolation, match=f"without videos, found token {IMAGE + 1}"):
        images_of(np.array([1, IMAGE + 1, 2], np.int32), np.array([0, 3]), (), PROCESSOR)


@pytest.mark.parametrize("end", [IMAGE, IMAGE + 1])
def test_a_sample_may_end_at_a_placeholder_which_is_scored_and_not_read(end: int):
    sequences = [[1, IMAGE, IMAGE, 2, end], [3, 4]]
    layout = PackLayout(pictures=PROCESSOR)
    packed = pack_sequences(sequences, layout, torch.device("cpu"), [(picture(2, 1),), ()])
    assert packed.images is not None
    assert packed.tokens[0].tolist() == [1, IMAGE, IMAGE, 2, 0, 3, 0]
    assert packed.labels.tolist() == [IMAGE, IMAGE, 2, end, 4]
