"""Log-probs of given tokens in both forms: the same numbers, and the same refusals.

# covers: C12
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from miles_async.engines.sglang.scores import pack_scores, read_scores
from miles_async.errors import EngineError
from miles_async.types import JsonObject


def reply(*logprobs: float | None) -> JsonObject:
    entries = [[logprob, token, None] for token, logprob in enumerate(logprobs)]
    return {"output_ids": [], "meta_info": {"weight_version": "7", "input_token_logprobs": entries}}


def packed(answer: JsonObject) -> bytes:
    found = pack_scores(answer)
    assert found is not None
    return found


FORMS = (msgspec.json.encode, packed)


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_give_the_same_numbers_to_the_last_bit(form: Callable[[JsonObject], bytes]) -> None:
    given = np.array([-0.1, -7.3e-5, -12.75], np.float32)
    found = read_scores(form(reply(None, *given.tolist())), 3, "here")
    assert found.weight_version == "7"
    assert found.logprobs.tobytes() == given.tobytes()


def test_a_packed_answer_has_four_bytes_per_token() -> None:
    assert len(packed(reply(None, *[-1.0] * 8000))) < 4 * 8001 + 100


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [((None, -1.0), "expected 2 log-probs of given tokens, found 1"), ((None, -1.0, None), "1 of them NaN")],
)
def test_too_few_and_missing_numbers_are_refused(
    form: Callable[[JsonObject], bytes], logprobs: tuple[float | None, ...], problem: str
) -> None:
    with pytest.raises(EngineError, match=f"here: .*{problem}"):
        read_scores(form(reply(*logprobs)), 2, "here")


def test_an_answer_with_tokens_where_none_were_asked_for_is_refused() -> None:
    """An engine that echoes the prompt; it is never packed, which would hide that."""
    echo = {**reply(None, -1.0), "output_ids": [0, 1]}
    assert pack_scores(echo) is None
    with pytest.raises(EngineError, match="here: expected no output tokens where none were asked for, found 2"):
        read_scores(msgspec.json.encode(echo), 1, "here")


@pytest.mark.parametrize("body", [b"", b"{", b"\x82", packed(reply(None, -1.0))[:-1]])
def test_a_cut_answer_is_refused(body: bytes) -> None:
    with pytest.raises(EngineError, match="here: unexpected answer"):
        read_scores(body, 1, "here")


@pytest.mark.parametrize("answer", [[], {"error": {}}, {"meta_info": {}}, reply()])
def test_an_answer_without_scores_stays_as_it_is(answer: object) -> None:
    assert pack_scores(answer) is None
