"""Processors of models that read images, where torchvision is absent."""

from __future__ import annotations

import pytest
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
from transformers.utils.import_utils import is_torchvision_available

from miles_async.engines.sglang.cpu.images import _without_videos


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision nothing is left out")
def test_videos_are_left_out_and_transformers_could_not_read_them() -> None:
    names = Qwen2_5_VLProcessor.get_attributes()
    assert names == ["image_processor", "tokenizer", "video_processor"]  # the last one, so that others keep their place
    assert _without_videos(lambda cls: names)(Qwen2_5_VLProcessor) == names[:2]
    with pytest.raises(ImportError, match="requires the Torchvision library"):
        Qwen2VLVideoProcessor()
