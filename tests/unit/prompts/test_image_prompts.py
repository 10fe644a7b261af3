"""Prompts with images by the chat template of Qwen2.5-VL and its image processor: tokens as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from miles_async.arguments import DataArguments
from miles_async.errors import DataError
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import PictureProcessor, load_picture_processor
from miles_async.types.pictures import data_url
from tests.fakes.chat_formats import TEMPLATES, chat_format
from tests.fakes.pictures import picture

NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
KEYS = '{"image": "images"}'


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    plain = Tokenizer.from_str(chat_format("qwen3").tokenizer.backend_tokenizer.to_str())  # a copy
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES)})
    tokenizer.chat_template = (TEMPLATES / "qwen25_vl.jinja").read_text()
    return ChatTemplate(tokenizer, apply_chat_template=True)


@pytest.fixture
def processor(template: ChatTemplate, tmp_path: Path) -> PictureProcessor:
    ids = dict(zip(NAMES, template.tokenizer.convert_tokens_to_ids(list(NAMES)), strict=True))
    config = {"vision_config": {}, "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 784, "longest_edge": 12544}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    loaded = load_picture_processor(tmp_path)
    assert loaded is not None
    return loaded


def source(template: ChatTemplate, processor: PictureProcessor, path: Path, row: dict[str, object]) -> FilePromptSource:
    path.write_text(json.dumps({"label": "1", **row}) + "\n")
    arguments = DataArguments(prompt_data=(str(path),), multimodal_keys=KEYS)
    return FilePromptSource(arguments, template.encode, expand=processor.expand)


def test_tokens_are_those_of_the_rendered_text(template: ChatTemplate, processor: PictureProcessor, tmp_path: Path):
    row = {"prompt": "<image>How many?<image>", "images": [data_url(picture(56, 56)), data_url(picture(30, 90))]}
    [prompt] = source(template, processor, tmp_path / "rows.jsonl", row).all_prompts()
    counts = [processor.inputs([each])["image_grid_thw"].prod() // 4 for each in prompt.pictures]
    first, second = ("<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" for count in counts)
    rendered = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{first}How many?{second}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert counts == [4, 3]
    assert list(prompt.token_ids) == template.tokenize(rendered)


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|video_pad|>"])
def test_a_text_with_the_name_of_a_placeholder_is_refused(
    template: ChatTemplate, processor: PictureProcessor, tmp_path: Path, name: str
):
    path = tmp_path / "rows.jsonl"
    prompts = source(template, processor, path, {"prompt": f"What is {name}?", "images": []})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: expected .*, found .*Fix these rows"):
        prompts.require_usable()
