"""Images that agents send: what is read, what is refused and how, in all protocols.

# covers: M13, M14
"""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime import picture_processor as processors
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser
from miles_async.trajectory.tree import Trajectory
from miles_async.types import JsonObject
from miles_async.types.pictures import data_url
from tests.fakes.chat_formats import chat_format
from tests.fakes.pictures import picture, picture_processor
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import agent_of

IMAGES = picture_processor(chat_format("qwen25_vl"))
CHAT = ChatTemplate(chat_format("qwen25_vl").tokenizer, apply_chat_template=True, ends=IMAGES.placeholders)
SMALL, LARGE = picture(2, 1), picture(4, 2, "blue")
ANSWER = CHAT.tokenize("yes<|im_end|>")


def make() -> Trajectory:
    return Trajectory(Renderer(CHAT, IMAGES), ReplyParser(chat=CHAT))


def asks(url: str, text: str = "What is it?") -> JsonObject:
    return {"role": "user", "content": [image(url), {"type": "text", "text": text}]}


def image(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


async def test_each_turn_has_the_images_of_the_conversation_and_a_sample_each_once() -> None:
    model = ScriptedModel(lambda call, input_ids: ANSWER)
    async with agent_of(model, make=make) as agent:
        first = await agent.chat(asks(data_url(SMALL)))
        said = {"role": "assistant", "content": "yes"}
        await agent.chat(asks(data_url(SMALL)), said, asks(data_url(LARGE), "And that?"))
        await agent.chat(asks(data_url(LARGE)), said, asks(data_url(LARGE)))  # another branch
        sample = await agent.sample()
    assert model.pictures == [(SMALL,), (SMALL, LARGE), (LARGE, LARGE)]
    assert model.sampling[0]["stop_token_ids"] == sorted(IMAGES.placeholders)
    written = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>"
    assert written.replace("<|image_pad|>", 2 * "<|image_pad|>") in CHAT.decode_all(model.requests[0])
    assert first.usage.prompt_tokens == len(model.requests[0])
    branches = [[(each.digest, len(each.content) > 0) for each in branch.pictures] for branch in sample.branches]
    assert branches == [[(SMALL.digest, True), (LARGE.digest, True)], [(LARGE.digest, False)] * 2]


async def test_a_placeholder_that_is_sampled_ends_its_turn_alone() -> None:
    ends = iter([[*CHAT.tokenize("yes"), IMAGES.image_token], ANSWER])
    model = ScriptedModel(lambda call, input_ids: next(ends))
    async with agent_of(model, make=make) as agent:
        first = (await agent.chat(asks(data_url(SMALL)))).choices[0].message
        assert first.content == "yes"
        await agent.chat(asks(data_url(SMALL)), first, {"role": "user", "content": "Sure?"})
        sample = await agent.sample()
    assert not sample.more_branches
    assert sample.tokens.tolist().count(IMAGES.image_token) == 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/cat.png", "since nothing is downloaded: it begins with https://example.com/cat.png"),
        ("file:///etc/passwd", "since nothing is downloaded"),
        (data_url(LARGE)[:60], "expected an image"),
        ("data:image/png;base64,#", "expected an image as data:image"),
        (data_url(picture(9, 9)), "at most 80 pixels, found one of 9 × 9"),
    ],
)
async def test_what_is_no_image_is_refused(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "MOST_PIXELS", 80)
    async with agent_of(ScriptedModel(lambda call, input_ids: ANSWER), make=make) as agent:
        source: JsonObject = {"type": "url", "url": url}
        if url.startswith("data:"):
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        with pytest.raises(openai.BadRequestError, match=words):
            await agent.chat(asks(url))
        with pytest.raises(openai.BadRequestError, match=words):
            await agent.respond({"role": "user", "content": [{"type": "input_image", "image_url": url}]})
        with pytest.raises(anthropic.BadRequestError, match=words):
            await agent.message({"role": "user", "content": [{"type": "image", "source": source}]})
        assert (await agent.collect()).failure is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image", "image": SMALL.digest}]}, "as parts of type image_url, found"),
        ({"role": "user", "content": [image(data_url(SMALL)), {"type": "file"}]}, "parts of type text or image"),
        ({"role": "user", "content": "<|image_pad|>"}, "one token for each of 0 images, found 1"),
        ({"role": "user", "content": [{"type": "image", "image": {}}]}, "as parts of type image_url, found"),
    ],
)
async def test_other_ways_to_an_image_are_refused(message: JsonObject, words: str) -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: ANSWER), make=make) as agent:
        with pytest.raises(openai.BadRequestError, match=words):
            await agent.chat(message)


async def test_a_model_that_reads_no_images_says_so() -> None:
    async with agent_of(ScriptedModel(lambda call, input_ids: ANSWER)) as agent:
        with pytest.raises(openai.BadRequestError, match="reads none"):
            await agent.chat(asks(data_url(SMALL)))
        with pytest.raises(openai.BadRequestError, match="as parts of type image_url, found"):
            await agent.chat({"role": "user", "content": [{"type": "image", "image": SMALL.digest}]})


async def test_images_may_be_longer_than_the_text_of_any_conversation_and_the_text_may_not() -> None:
    noise = "A" * 200_000
    async with agent_of(ScriptedModel(lambda call, input_ids: ANSWER), make=make, max_total=900) as agent:
        status, answer = await agent.post("v1/chat/completions", {"messages": [asks(data_url(SMALL), noise)]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "bytes without its images, more than 94336" in answer["error"]["message"]
        padded = data_url(SMALL) + "AAAA" * 50_000  # after the image's end
        body = json.dumps({"messages": [asks(padded)]}).encode()
        assert (await agent.post("v1/chat/completions", raw=body))[0] == 200
        status, answer = await agent.post("v1/chat/completions", raw=b"[" + b" " * (1 << 25) + b" " * 94336)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "and 33554432 for images" in answer["error"]["message"]
