"""How many tokens an image is, and what the model reads of it: the processor's own answers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_async.errors import ConfigurationError, TrajectoryError
from miles_async.runtime.picture_processor import PictureProcessor, load_picture_processor
from miles_async.types import Picture
from miles_async.types.pictures import digest_of

IMAGE, VIDEO = 60, 61
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 16,
}


def picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Picture:
    bands = len(mode)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels if bands > 1 else pixels[..., 0], mode).save(file, "PNG")
    return Picture(content=file.getvalue(), digest=digest_of(file.getvalue()), width=width, height=height)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return tmp_path


@pytest.fixture
def processor(model: Path) -> PictureProcessor:
    loaded = load_picture_processor(model)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(("width", "height"), [(56, 56), (28, 84), (30, 57), (400, 200), (20, 20)])
def test_tokens_by_size_are_those_of_the_pixels(processor: PictureProcessor, width: int, height: int):
    inputs = processor.inputs([picture(width, height)])
    assert set(inputs) == {"pixel_values", "image_grid_thw"}
    assert processor.tokens(width, height) == inputs["image_grid_thw"].prod() // 4 == len(inputs["pixel_values"]) // 4


def test_a_prompt_has_as_many_tokens_as_its_images(processor: PictureProcessor):
    expanded = processor.expand([1, IMAGE, 2, IMAGE, 3], [(56, 56), (28, 28)])
    assert expanded == (1, *[IMAGE] * 4, 2, IMAGE, 3)


@pytest.mark.parametrize(("tokens", "sizes"), [([1, IMAGE], []), ([1], [(28, 28)])])
def test_a_text_with_the_name_of_the_token_is_refused(
    processor: PictureProcessor, tokens: list[int], sizes: list[tuple[int, int]]
):
    with pytest.raises(TrajectoryError, match=rf"one token for each of {len(sizes)} images, found {1 - len(sizes)}"):
        processor.expand(tokens, sizes)


def test_a_prompt_with_a_video_is_refused(processor: PictureProcessor):
    assert processor.placeholders == {IMAGE, VIDEO}
    with pytest.raises(TrajectoryError, match=f"without videos, found token {VIDEO}"):
        processor.expand([1, VIDEO], [])


def test_images_of_several_samples_are_concatenated(processor: PictureProcessor):
    pictures = [picture(56, 56), picture(28, 84, seed=1), picture(28, 28, seed=2)]
    together = processor.inputs(pictures)
    alone = [processor.inputs([each]) for each in pictures]
    for name, array in together.items():
        np.testing.assert_array_equal(array, np.concatenate([each[name] for each in alone]))


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_other_modes_are_read_as_rgb(processor: PictureProcessor, mode: str):
    assert processor.inputs([picture(28, 28, mode=mode)])["pixel_values"].shape == (4, 3 * 2 * 14 * 14)


def test_a_broken_image_is_refused(processor: PictureProcessor):
    whole = picture(56, 56)
    broken = Picture(content=whole.content[:200], digest="", width=56, height=56)
    with pytest.raises(TrajectoryError, match="expected an image, found 200 bytes"):
        processor.inputs([broken])


def test_a_text_model_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_picture_processor(tmp_path) is None


def test_a_model_that_reads_images_without_their_token_is_refused(model: Path):
    (model / "config.json").write_text('{"vision_config": {}}')
    with pytest.raises(ConfigurationError, match=r"vision_config.* expected image_token_id"):
        load_picture_processor(model)


def test_a_model_without_its_processor_is_refused(model: Path):
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"no usable processor .*preprocessor_config.json"):
        load_picture_processor(model)


def test_images_are_prepared_once_while_there_is_room(processor: PictureProcessor):
    calls: list[int] = []

    class Counting:
        merge_size = 2

        def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
            raise AssertionError("not asked for")

        def __call__(self, images: list[object], *, return_tensors: str) -> dict[str, np.ndarray]:
            calls.append(len(images))
            return {"pixel_values": np.zeros(4, np.float32)}

    first, second = picture(28, 28), picture(28, 28, seed=1)
    roomy = PictureProcessor(processor=Counting(), image_token=IMAGE)
    assert len(roomy.inputs([first, second, first])["pixel_values"]) == 12
    roomy.inputs([second, first])
    assert len(calls) == 2
    tight = PictureProcessor(processor=Counting(), image_token=IMAGE, kept_bytes=16)
    tight.inputs([first, first, second, first])
    assert len(calls) == 2 + 3
