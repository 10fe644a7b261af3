"""Requests with images: what SGLang gets in place of the tokens that the model reads."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from miles_async.engines.answer_guard import check_answer
from miles_async.engines.http import Http
from miles_async.engines.sglang.answers import DECODER, TEXT_FROM
from miles_async.engines.sglang.api import SGLangServer
from miles_async.errors import TransientEngineError
from miles_async.types import GenerateRequest, Generation, Picture
from miles_async.types.pictures import digest_of

IMAGE = 60
JPEG = b"\xff\xd8\xff\xe0"  # in base64 it begins with a slash


def picture(content: bytes) -> Picture:
    return Picture(content=content, digest=digest_of(content), width=56, height=56)


def request(**fields: object) -> GenerateRequest:
    tokens = np.array([1, *[IMAGE] * 4, 2, *[IMAGE] * 3, 3, 4, 5], np.int32)
    given = {"pictures": (picture(JPEG), picture(b"second")), "image_token": IMAGE, "text_from": 9, "decoder_id": 7}
    return GenerateRequest(input_ids=tokens, sampling={}, routing_key="0", **(given | fields))


def encoded(request: GenerateRequest) -> dict[str, Any]:
    return json.loads(SGLangServer(Http()).encode(request, request_id="r", version=3, experts=False))


@pytest.fixture
def body() -> dict[str, Any]:
    return encoded(request())


def test_each_image_is_one_token_and_a_file(body: dict[str, Any]):
    assert body["input_ids"] == [1, IMAGE, 2, IMAGE, 3, 4, 5]
    urls = [url.partition(",") for url in body["image_data"]]
    assert [base64.b64decode(content) for _, _, content in urls] == [JPEG, b"second"]
    assert {kind for kind, *_ in urls} == {"data:image;base64"}


def test_the_text_begins_at_the_same_token(body: dict[str, Any]):
    assert body[DECODER] == 7
    assert body["input_ids"][body[TEXT_FROM] :] == request().input_ids[9:].tolist() == [3, 4, 5]


def test_requests_without_images_stay_as_they_are():
    body = encoded(request(pictures=(), image_token=None))
    assert body["input_ids"] == request().input_ids.tolist()
    assert "image_data" not in body


def test_an_engine_that_reads_other_tokens_is_found_out():
    tokens = len(request().input_ids)

    def answer(prompt_tokens: int) -> Generation:
        arrays = {"output_ids": np.array([9], np.int32), "logprobs": np.zeros(1, np.float32)}
        versions = np.zeros(1, np.int32)
        return Generation(**arrays, weight_versions=versions, finish_reason="stop", prompt_tokens=prompt_tokens)

    check_answer(answer(tokens), request(), 64, "http://engine")
    with pytest.raises(TransientEngineError, match=f"expected an answer to {tokens} tokens, found one to {tokens + 1}"):
        check_answer(answer(tokens + 1), request(), 64, "http://engine")
