"""A chat model as the reward: what it is asked, how its verdict is read, whose fault its failures are.

# covers: C6
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from miles_async.arguments import RewardArguments
from miles_async.arguments.rewards import parse_judge_scale
from miles_async.errors import ConfigurationError, RewardError, ServiceUnavailableError
from miles_async.rewards.hub import RewardHub
from miles_async.rewards.judge import JudgeReward, read_verdict
from miles_async.runtime.services import Services
from miles_async.types import JsonObject, Prompt
from tests.fakes.environment_servers import serving
from tests.property.builders import make_sample

PROMPT = Prompt(prompt_id="p:1", token_ids=(1,), text="17*4?", label="68")
SAMPLE = make_sample([0], text="<think>{label}</think> It is {prompt}: 68")

CUT = "Mark: 1"  # of 10, the server says


@asynccontextmanager
async def judge(
    tmp_path: Path,
    say: Callable[[int], object],
    template: str = "{answer} {x}",
    scale: str = "0-10",
) -> AsyncIterator[tuple[list[JsonObject], JudgeReward]]:
    """``say``: number of the request → what the model says, the whole body, or a status."""
    requests: list[JsonObject] = []

    async def respond(request: web.Request) -> web.Response:
        requests.append((request.headers.get("Authorization"), await request.json()))
        answer = say(len(requests) - 1)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        ending = "length" if answer == CUT else "stop"
        body = {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": ending}]}
        body = {} if answer == "{}" else body
        return web.Response(text=json.dumps(body))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", respond)
    path = tmp_path / "judge.txt"
    path.write_text(template)
    async with serving(app) as url:
        reward = JudgeReward(f"{url}/v1/", "big", path, 5.0, scale)
        yield requests, reward
        await reward.close()


async def test_the_judge_is_asked_what_the_template_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    template = 'Q: {prompt} A: {answer} all: {response} right: {label} {"json": {}}'
    async with judge(tmp_path, lambda n: "Mark: 7/10", template) as (requests, reward):
        assert await reward(PROMPT, SAMPLE) == 0.7
    asked = (
        "Q: 17*4? A: It is {prompt}: 68 all: <think>{label}</think> It is {prompt}: 68 right: 68 "
        '{"json": {}}'  # what a response has in braces is not filled in, nor are other braces read
    )
    assert requests == [("Bearer secret", {"model": "big", "messages": [{"role": "user", "content": asked}]})]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("7", 7.0),
        ("Score: 0.5.", 0.5),
        ("It is 3 of 4 steps.\n\nMark: 7/10\n", 7.0),
        ("7 / 10", 7.0),
        ("**7**/10", 7.0),
        ("**Mark:** `7`/10.", 7.0),
        ("8 out of 10", 8.0),
        ("Score (0-10): 8", 8.0),
        ("score = 10", 10.0),
    ],
)
def test_the_verdict_is_the_mark_in_the_last_line(said: str, expected: float) -> None:
    assert read_verdict(said, 0, 10) == expected


@pytest.mark.parametrize(
    "said",
    [
        "9" * 50,
        "11",
        "-1",
        "7/100",
        "7/0",
        "7/10 (on a scale of 0-10)",
        "first 3, then 2",
        "I gave 7, and 2 more",
        "7\nThe answer is right.",
        "at 12:30",
        "none of v2 is right",
        "7,5",
        "١",
        "7/10/10",
        "",
    ],
)
def test_a_last_line_that_is_not_clearly_a_mark_is_none(said: str) -> None:
    assert read_verdict(said, 0, 10) is None


def test_marks_belong_to_the_declared_scale() -> None:
    assert read_verdict("3/5", 1, 5) == 3.0
    assert read_verdict("3/5 (on a scale of 1-5)", 1, 5) is None
    assert read_verdict("0", 1, 5) is None
    assert read_verdict("3/10", 1, 5) is None


@pytest.mark.parametrize("text", ["10", "5-5", "10-0", "a-b", "1-5-9", "-1-1", ""])
def test_a_scale_has_a_lowest_and_a_highest_mark(text: str) -> None:
    assert parse_judge_scale("1-5") == (1.0, 5.0)
    with pytest.raises(ConfigurationError, match="--judge-scale: expected the lowest and the highest mark"):
        parse_judge_scale(text)


async def test_the_reward_is_the_marks_share_of_the_scale(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: "3/5", scale="1-5") as (_, reward):
        assert await reward(PROMPT, SAMPLE) == 0.5


async def test_a_judge_that_talks_nonsense_is_asked_again(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: ["no mark", CUT, "5"][n]) as (requests, reward):
        assert await reward(PROMPT, SAMPLE) == 0.5
    assert len(requests) == 3


async def test_a_judge_that_says_nothing_gives_no_verdict(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: None) as (_, reward):
        with pytest.raises(RewardError, match="found ''"):
            await reward(PROMPT, SAMPLE)


async def test_without_a_verdict_in_several_tries_the_error_has_what_was_said(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: "3/5 (on a scale of 1-5)") as (requests, reward):
        with pytest.raises(RewardError, match=r"from 0 to 10 \(--judge-scale\), found '3/5 \(on a") as caught:
            await reward(PROMPT, SAMPLE)
    assert not isinstance(caught.value, ServiceUnavailableError)  # it answers, but can't judge this sample
    assert len(requests) == 3


async def test_an_answer_that_is_no_chat_completion_says_nothing_about_the_sample(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: "{}") as (_, reward):
        with pytest.raises(ServiceUnavailableError, match="expected a chat completion"):
            await reward(PROMPT, SAMPLE)


async def test_a_request_that_the_judge_refuses_is_the_samples_own_fault(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: 400) as (_, reward):
        with pytest.raises(RewardError, match="status 400") as caught:
            await reward(PROMPT, SAMPLE)
    assert not isinstance(caught.value, ServiceUnavailableError)


@pytest.mark.parametrize("answer", [500, 503, 429, 401])
async def test_a_judge_that_is_down_says_nothing_about_the_sample(tmp_path: Path, answer: int) -> None:
    async with judge(tmp_path, lambda n: answer) as (_, reward):
        with pytest.raises(ServiceUnavailableError, match=f"status {answer}"):
            await reward(PROMPT, SAMPLE)


async def test_flags_choose_the_judge_and_its_template_must_show_a_response(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: "2.5") as (_, reward):
        url = reward._server.url.removesuffix("/chat/completions")  # type: ignore[union-attr]
        path = tmp_path / "judge.txt"
        hub = RewardHub(
            RewardArguments(rm_type="judge:2", judge_url=url, judge_template=path, judge_scale="0-10"), Services()
        )
        assert await hub(PROMPT, SAMPLE) == 0.5
        await hub.close()
    path.write_text("Is {prompt} right?")
    with pytest.raises(ConfigurationError, match=r"--judge-template .* expected \{response\} or \{answer\}"):
        RewardHub(RewardArguments(rm_type="judge", judge_url=url, judge_template=path), Services())
    with pytest.raises(ConfigurationError, match="cannot be read"):
        RewardHub(RewardArguments(rm_type="judge", judge_url=url, judge_template=tmp_path / "absent.txt"), Services())
    with pytest.raises(RewardError, match="give --judge-url"):
        await RewardHub(RewardArguments(), Services()).rewards["judge"](PROMPT, SAMPLE)
