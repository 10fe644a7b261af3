"""A chat model as the reward: what it is asked, how its verdict is read, whose fault its failures are.

# covers: C6
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from arguments import RewardArguments
from miles_async.errors import ConfigurationError, RewardError, RewardUnavailableError
from miles_async.rewards.hub import RewardHub
from miles_async.rewards.judge import JudgeReward, verdict
from miles_async.types import Prompt
from tests.property.builders import make_sample

PROMPT = Prompt(prompt_id="p:1", token_ids=(1,), text="17*4?", label="68")
SAMPLE = make_sample([0], text="<think>{label}</think> It is {prompt}: 68")


@asynccontextmanager
async def judge(
    tmp_path: Path, say: Callable[[int], Any], template: str = "{answer} {x}", timeout: float = 5.0
) -> AsyncIterator[tuple[list[Any], JudgeReward]]:
    """``say``: number of the request → what the model says, the whole body, or a status."""
    requests: list[Any] = []

    async def respond(request: web.Request) -> web.Response:
        requests.append((request.headers.get("Authorization"), await request.json()))
        answer = say(len(requests) - 1)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        body = {"choices": [{"message": {"role": "assistant", "content": answer}}]} if answer != "{}" else {}
        return web.Response(text=json.dumps(body))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = tmp_path / "judge.txt"
    path.write_text(template)
    reward = JudgeReward(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/", "big", path, timeout)
    try:
        yield requests, reward
    finally:
        await reward.close()
        await runner.cleanup()


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
        ("1", 1.0),
        ("Score: 0.5.", 0.5),
        ("first 3, then -2", -2.0),
        ("7/10", 0.7),
        ("7 / 10", 0.7),
        ("**8**", 8.0),
        ("<think>9</think>no mark", None),
        ("<think>9</think>3", 3.0),
        ("none of v2 is right", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_the_verdict_is_the_last_number_after_the_thoughts(said: str, expected: float | None) -> None:
    assert verdict(said) == expected


async def test_a_busy_judge_is_asked_again(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: 503 if n < 2 else "1") as (requests, reward):
        assert await reward(PROMPT, SAMPLE) == 1.0
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "words"), [("no mark", "no mark"), (None, "as the judge's verdict"), ("{}", "chat")]
)
async def test_a_judge_without_a_verdict_says_nothing_about_the_sample(tmp_path: Path, answer: Any, words: str) -> None:
    async with judge(tmp_path, lambda n: answer) as (requests, reward):
        with pytest.raises(RewardUnavailableError, match=words):
            await reward(PROMPT, SAMPLE)
    assert len(requests) == 1  # whoever wants a verdict asks again


async def test_what_the_judge_refuses_is_the_samples_own_fault(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: 400) as (_, reward):
        with pytest.raises(RewardError, match="status 400") as caught:
            await reward(PROMPT, SAMPLE)
    assert not isinstance(caught.value, RewardUnavailableError)


async def test_a_judge_that_stays_down_is_infrastructure(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: 500, timeout=0.5) as (_, reward):
        with pytest.raises(RewardUnavailableError, match=r"for 0\.5 s \(--reward-timeout\)"):
            await reward(PROMPT, SAMPLE)


async def test_flags_choose_the_judge_and_its_template_must_show_a_response(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda n: "0.25") as (_, reward):
        url = reward._server.url.removesuffix("/chat/completions")  # type: ignore[union-attr]
        path = tmp_path / "judge.txt"
        hub = RewardHub(RewardArguments(rm_type="judge:2", judge_url=url, judge_template=path))
        assert await hub(PROMPT, SAMPLE) == 0.5
        await hub.close()
    path.write_text("Is {prompt} right?")
    with pytest.raises(ConfigurationError, match=r"--judge-template .* expected \{response\} or \{answer\}"):
        RewardHub(RewardArguments(rm_type="judge", judge_url=url, judge_template=path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        RewardHub(RewardArguments(rm_type="judge", judge_url=url, judge_template=tmp_path / "absent.txt"))
    with pytest.raises(RewardError, match="give --judge-url"):
        await RewardHub(RewardArguments()).rewards["judge"](PROMPT, SAMPLE)
