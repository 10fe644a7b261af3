"""Text of a response: the engine's without what bounds it, else decoded here, and never in the event loop's turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from miles_async.rollout.generate import SingleTurnGenerate
from miles_async.types import Attempt, GenerateRequest, Generation, Prompt
from tests.fakes.text_of_tokens import TextOfTokens

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
        return Generation(
            output_ids=np.arange(length, dtype=np.int32),
            logprobs=np.zeros(length, np.float32),
            weight_versions=np.zeros(length, np.int32),
            finish_reason="abort" if aborted else "stop",
            text=None if aborted else self.text,
        )


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


@pytest.mark.parametrize(("length", "in_thread"), [(8, False), (8192, True)])
async def test_without_it_the_tokens_are_decoded_and_many_in_a_thread(length: int, in_thread: bool) -> None:
    threads: list[threading.Thread] = []

    def decode(token_ids: Sequence[int]) -> str:
        threads.append(threading.current_thread())
        return f"{len(token_ids)} tokens"

    generate = SingleTurnGenerate({"max_new_tokens": 9000}, TextOfTokens(decode))
    assert (await generate(Engine(length, None), ATTEMPT, 0)).text == f"{length} tokens"
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]
