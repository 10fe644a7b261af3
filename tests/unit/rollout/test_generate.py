"""Text of a response: the engine's without what bounds it, else decoded here, and never in the event loop's turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from miles_async.rollout.generate import SingleTurnGenerate
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.types import Attempt, GenerateRequest, Generation, Picture, Prompt
from tests.fakes.text_of_tokens import TextOfTokens
from tests.property.builders import make_generation

ATTEMPT = Attempt(attempt_id=0, prompt=Prompt(prompt_id="p", token_ids=(5, 6), text=""), epoch=0)


class Engine:
    """Answers ``length`` tokens; the first call is aborted halfway if ``aborts``."""

    def __init__(self, length: int, text: str | None, *, aborts: bool = False) -> None:
        self.length, self.text, self.aborts = length, text, aborts
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        aborted = self.aborts and len(self.requests) == 1
        length = min(self.length // 2 if aborted else self.length, request.sampling["max_new_tokens"])
        finish_reason, text = ("abort", None) if aborted else ("stop", self.text)
        return make_generation(range(length), finish_reason=finish_reason, text=text)


def refuse(token_ids: Sequence[int]) -> str:
    raise AssertionError("the engine has decoded them")


async def test_the_engine_s_text_is_taken_without_what_ends_it() -> None:
    engine = Engine(4, "said.")
    sample = await SingleTurnGenerate({"max_new_tokens": 9}, TextOfTokens(refuse, decoder_id=7))(engine, ATTEMPT, 0)
    assert sample.text == "said"
    assert [(request.decoder_id, request.text_from) for request in engine.requests] == [(7, 2)]


async def test_a_turn_that_goes_on_asks_for_the_text_of_all_its_chunks() -> None:
    engine = Engine(4, "all of it.", aborts=True)
    sample = await SingleTurnGenerate({"max_new_tokens": 9}, TextOfTokens(refuse, decoder_id=7))(engine, ATTEMPT, 0)
    assert (sample.text, sample.response_length) == ("all of it", 6)
    assert [(len(request.input_ids), request.text_from) for request in engine.requests] == [(2, 2), (4, 2)]


async def test_a_turn_that_ends_aborted_at_its_limit_is_decoded_here() -> None:
    decoder = TextOfTokens(lambda ids: f"{len(ids)} tokens", decoder_id=7)
    sample = await SingleTurnGenerate({"max_new_tokens": 2}, decoder)(Engine(4, "no", aborts=True), ATTEMPT, 0)
    assert (sample.text, sample.finish_reason) == ("2 tokens", "length")


@pytest.mark.parametrize(
    ("stop", "found"),
    [(["|2|3|0|"], 5), (["no", "|3|0|1|2|"], 7), (["|2|3|1|"], 12), ([], 12)],
)
async def test_a_stop_text_that_a_publication_splits_ends_the_turn(stop: list[str], found: int) -> None:
    """The engine looks for it in what it samples for one request: 0 1 2 3, then 0 1 2 3 4 5 6 7."""
    # covers: R2
    decoder = TextOfTokens(lambda ids: "|" + "".join(f"{token}|" for token in ids), decoder_id=7)
    sampling = {"max_new_tokens": 90, "stop": stop}
    sample = await SingleTurnGenerate(sampling, decoder)(Engine(8, "all of it.", aborts=True), ATTEMPT, 0)
    assert (sample.response_length, sample.finish_reason) == (found, "stop")
    assert sample.text == ("all of it" if found == 12 else decoder.decode(sample.tokens[2:].tolist()))
    assert len(sample.rollout_logprobs) == len(sample.weight_versions) == 2 + found


@pytest.mark.parametrize(("length", "in_thread"), [(8, False), (8192, True)])
async def test_without_it_the_tokens_are_decoded_and_many_in_a_thread(length: int, in_thread: bool) -> None:
    threads: list[threading.Thread] = []

    def decode(token_ids: Sequence[int]) -> str:
        threads.append(threading.current_thread())
        return f"{len(token_ids)} tokens"

    generate = SingleTurnGenerate({"max_new_tokens": 9000}, TextOfTokens(decode))
    assert (await generate(Engine(length, None), ATTEMPT, 0)).text == f"{length} tokens"
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]


PICTURE = Picture(content=b"an image", digest="d", width=28, height=28)
WITH_IMAGE = Attempt(
    attempt_id=0, prompt=Prompt(prompt_id="p", token_ids=(60, 6), text="", pictures=(PICTURE,)), epoch=0
)


def reads(image_token: int, video_token: int | None = None) -> PictureProcessor:
    return PictureProcessor(processor=None, image_token=image_token, video_token=video_token)


async def test_images_of_the_prompt_are_in_every_request_and_in_the_sample() -> None:
    engine = Engine(4, None, aborts=True)
    decoder = TextOfTokens(lambda ids: "")
    sample = await SingleTurnGenerate({"max_new_tokens": 9}, decoder, images=reads(60))(engine, WITH_IMAGE, 0)
    assert [(request.pictures, request.image_token) for request in engine.requests] == [((PICTURE,), 60)] * 2
    assert sample.pictures == (PICTURE,)


@pytest.mark.parametrize(
    ("images", "ends"),
    [(reads(60), {"stop_token_ids": [60]}), (reads(60, 58), {"stop_token_ids": [58, 60]}), (None, {})],
)
async def test_a_response_ends_at_a_token_that_stands_for_an_image(
    images: PictureProcessor | None, ends: dict[str, object]
) -> None:
    engine = Engine(4, None)
    await SingleTurnGenerate({"max_new_tokens": 9}, TextOfTokens(lambda ids: ""), images=images)(engine, ATTEMPT, 0)
    assert engine.requests[0].sampling == {"max_new_tokens": 9, **ends}
