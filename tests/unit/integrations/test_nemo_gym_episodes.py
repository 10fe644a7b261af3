"""Tasks of NeMo Gym: what its resources servers are asked, and whose fault a failure is.

Answers are those that a real server gave, and of servers that misbehave. tests/e2e/test_environment_servers.py compares
the first with a real server, and trains with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from miles_async.errors import ConfigurationError, OverdueError, ServiceUnavailableError, UserCodeError
from miles_async.integrations.generate_rows import generated_rows
from miles_async.integrations.nemo_gym_episodes import NemoGym, NemoGymEpisode, task_rows
from miles_async.runtime.services import is_outage
from miles_async.types import Observation, Prompt
from tests.fakes.environment_servers import nemo_gym, recording, serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.turns import answer, calling
from tests.unit.rollout.test_multi_turn import ATTEMPT, generate_with, says

GYM = recording("nemo_gym")
TASK: dict[str, Any] = GYM["sessions"][0][0][0][1]
CALCULATOR = "calculator"
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


def prompt(task: object = TASK) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), text="?", metadata={"nemo_gym": task})


def episode(url: str, *, max_turns: int = 8) -> NemoGymEpisode:
    return NemoGym(url, answer_timeout=20.0, max_turns=max_turns)(prompt())


@asynccontextmanager
async def playing(app: web.Application, *, max_turns: int = 8) -> AsyncIterator[NemoGymEpisode]:
    async with serving(app) as url:
        yield (played := episode(url, max_turns=max_turns))
        await played.close()


async def test_an_episode_is_seeded_calls_tools_and_is_verified_in_one_session() -> None:
    async with serving(nemo_gym(GYM)) as url:
        gym = NemoGym(url, answer_timeout=20.0, max_turns=8)
        await gym.start()
        played = gym(prompt())
        (tool,) = played.tools()
        assert tool["function"]["name"] == CALCULATOR
        assert [*tool["function"]["parameters"]["properties"]] == ["expression"]
        observed = await played.step(calling((CALCULATOR, {"expression": "17*23"})))
        assert observed == Observation(
            messages=({"role": "tool", "content": "391", "tool_call_id": "call000"},),
            reward=0.0,
            metrics={"tool_calls": 1, "tool_errors": 0},
        )
        assert await played.step(answer("391", 1)) == Observation(done=True, reward=1.0)
        await played.close()


async def test_a_tools_errors_are_the_models_to_read_and_a_cut_turn_is_verified() -> None:
    async with playing(nemo_gym(GYM)) as played:
        asked = [{"formula": "17*23"}, {"expression": "17"}]
        observed = await played.step(calling(*((CALCULATOR, arguments) for arguments in asked)))
        refused, raised = [message["content"] for message in observed.messages]
        assert "Field required" in refused
        assert raised == "Internal Server Error"
        assert observed.metrics == {"tool_calls": 2, "tool_errors": 2}
        assert await played.step(answer("3", 1, "length")) == Observation(done=True, reward=0.0)


Respond = Callable[[str, Any], Awaitable[tuple[int, object]]]
ASKED = web.AppKey("asked", list)


def responding(respond: Respond) -> web.Application:
    """A server that ``respond`` makes, of (path, body); a text is sent as it is."""
    app = web.Application()
    app[ASKED] = []

    async def asked(request: web.Request) -> web.Response:
        body = await request.json()
        app[ASKED].append((request.path, body))
        status, told = await respond(request.path, body)
        return web.Response(status=status, text=told if isinstance(told, str) else json.dumps(told))

    app.add_routes([web.post("/{path}", asked)])
    return app


def failing_at(path: str, status: int, told: object = "") -> web.Application:
    async def respond(at: str, body: Any) -> tuple[int, object]:
        return (status, told) if at == path else (200, {"reward": 1.0})

    return responding(respond)


async def test_only_tools_of_the_task_are_called() -> None:
    async with playing(app := failing_at("", 200)) as played:
        observed = await played.step(calling(("verify", {}), ("../x", {}), (CALCULATOR, "no object")))
        assert [message["content"] for message in observed.messages] == [
            "error: there is no tool 'verify'",
            "error: there is no tool '../x'",
            "error: expected the arguments to be an object",
        ]
        assert observed.metrics["tool_errors"] == 3
        assert [path for path, _ in app[ASKED]] == ["/seed_session"]


async def test_the_last_turn_that_is_allowed_is_verified_with_what_its_tools_said() -> None:
    async with playing(app := failing_at("", 200), max_turns=1) as played:
        observed = await played.step(calling((CALCULATOR, {"expression": "1*1"})))
        assert (observed.done, observed.reward) == (False, 1.0)
        *_, (path, body) = app[ASKED]
        assert path == "/verify"
        kinds = [item["type"] for item in body["response"]["output"]]
        assert kinds == ["function_call", "function_call_output"]
        assert body["answer"] == TASK["answer"]


@pytest.mark.parametrize(("path", "says_what"), [("/seed_session", "seed_session"), ("/verify", "verify")])
@pytest.mark.parametrize("status", [422, 500])
async def test_an_environment_that_refuses_or_raises_costs_the_attempt(path: str, says_what: str, status: int) -> None:
    async with playing(failing_at(path, status, "KeyError('answer')")) as played:
        with pytest.raises(UserCodeError, match=rf"refused /{says_what} with status {status}: KeyError\('answer'\)"):
            await played.step(answer("391"))


@pytest.mark.parametrize("path", ["/seed_session", "/calculator", "/verify"])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_server_that_is_overloaded_or_away_is_down(path: str, status: int) -> None:
    # covers: C6
    async with playing(failing_at(path, status, "busy")) as played:
        with pytest.raises(ServiceUnavailableError, match=rf"answered {path} with status {status}: busy"):
            await played.step(answer("1", 1) if path == "/verify" else calling((CALCULATOR, {"expression": "1*1"})))


async def test_a_server_that_dies_or_was_never_there_is_down() -> None:
    # covers: C6
    async def dies(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/seed_session", dies)
    async with serving(app) as url:
        for address in (url, "http://127.0.0.1:1"):
            played = episode(address)
            with pytest.raises(Exception, match=r"not enough data|Cannot connect|payload|disconnected") as down:
                await played.step(answer("391"))
            assert is_outage(down.value)
            await played.close()


async def test_a_reward_that_the_server_calls_failed_is_none() -> None:
    # covers: C6
    masked = {"reward": 0.0, "mask_sample": True, "failure_reason": "the judge is away"}
    async with playing(failing_at("/verify", 200, masked)) as played:
        with pytest.raises(ServiceUnavailableError, match="failed to verify: the judge is away"):
            await played.step(answer("391"))


@pytest.mark.parametrize("told", ["hello", '{"reward": NaN}', {"score": 1}, {"reward": "much"}, [1]])
async def test_nonsense_costs_the_attempt(told: object) -> None:
    async with playing(failing_at("/verify", 200, told)) as played:
        with pytest.raises(UserCodeError, match="expected a reward of /verify"):
            await played.step(answer("391"))


async def test_a_step_that_hangs_costs_its_attempt() -> None:
    async def hangs(path: str, body: Any) -> tuple[int, object]:
        await asyncio.sleep(600)
        raise AssertionError

    async with serving(responding(hangs)) as url:
        with pytest.raises(OverdueError):
            await generate_with(lambda given: episode(url), step_timeout=0.5)(ScriptedModel(says("391")), ATTEMPT, 0)


async def test_connections_that_the_server_closes_after_an_answer_are_not_missed() -> None:
    async def asked(request: web.Request) -> web.Response:
        transport = request.transport
        assert transport is not None
        asyncio.get_running_loop().call_later(0.01, transport.close)  # as uvicorn does after an exception
        return web.json_response({"reward": 1.0})

    app = web.Application()
    app.router.add_post("/{path}", asked)
    async with playing(app) as played:
        for _ in range(20):
            await played.step(calling((CALCULATOR, {"expression": "1*1"})))


async def test_a_megabyte_is_an_answer() -> None:
    async with playing(failing_at("/calculator", 200, "x" * 1_000_000)) as played:
        (message,) = (await played.step(calling((CALCULATOR, {"expression": "1*1"})))).messages
        assert len(message["content"]) == 1_000_000


async def test_two_hundred_episodes_at_once_have_a_session_each() -> None:
    async def counts(request: web.Request) -> web.Response:
        number = request.cookies.get("session", str(len(steps)))
        steps[number] = steps.get(number, 0) + 1
        response = web.json_response({"reward": steps[number]} if request.path == "/verify" else steps[number])
        response.set_cookie("session", number)
        return response

    async def plays(played: NemoGymEpisode) -> float | None:
        await played.step(calling((CALCULATOR, {})))
        reward = (await played.step(answer("391", 1))).reward
        await played.close()
        return reward

    steps: dict[str, int] = {}
    app = web.Application()
    app.router.add_post("/{path}", counts)
    async with serving(app) as url:
        rewards = await asyncio.gather(*(plays(episode(url)) for _ in range(200)))
    assert rewards == [3.0] * 200
    assert len(steps) == 200


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["/run", "/v1/responses"], r"found one without /seed_session and /verify$"),
        (["/reset", "/step"], r"servers with /reset and /step \(GymnasiumServer\) are not supported"),
    ],
)
async def test_another_server_of_nemo_gym_is_refused_when_the_run_starts(paths: list[str], problem: str) -> None:
    async with serving(nemo_gym({"paths": paths, "sessions": []})) as url:
        with pytest.raises(ConfigurationError, match=problem):
            await NemoGym(url, answer_timeout=20.0, max_turns=8).start()


async def test_what_is_no_server_of_nemo_gym_is_refused_when_the_run_starts() -> None:
    async with serving(web.Application()) as url:
        for address, problem in ((url, "404"), ("http://127.0.0.1:1", "Cannot connect")):
            with pytest.raises(ConfigurationError, match=rf"NeMo Gym at {address} \(--environment\).*{problem}"):
                await NemoGym(address, answer_timeout=20.0, max_turns=8).start()


def test_prompts_are_the_tasks_of_the_file(tmp_path: Path) -> None:
    params = {**TASK["responses_create_params"], "instructions": "Be brief.", "temperature": 1.0}
    params["input"] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "No words."}]},
        *params["input"],
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({**TASK, "responses_create_params": params, "n": n}) for n in range(4)))
    first, second = generated_rows("nemo-gym", "http://127.0.0.1:1", {"data": str(path)}, 2, 42)
    assert first["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "No words."},
        {"role": "user", "content": "17*23=?"},
    ]
    assert (first["metadata"]["nemo_gym"]["n"], second["metadata"]["nemo_gym"]["n"]) == (0, 1)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "expected messages without images"),
        ({"input": "?", "tools": [{"type": "web_search"}]}, "web_search is a tool of OpenAI's servers"),
        ({"input": "?", "tool_choice": "required"}, "tool_choice"),
        ({"input": "?", "text": {"format": {"type": "json_object"}}}, "tool_choice and text.format are not supported"),
        ({"input": "?", "colour": "red"}, "responses_create_params: Object contains unknown field `colour`"),
        (None, "responses_create_params: Expected `object`, got `null`"),
    ],
)
def test_tasks_that_are_unsupported_are_refused_by_name(params: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"responses_create_params": params}))
    with pytest.raises(ConfigurationError, match=r"tasks\.jsonl, task 1: .*") as refused:
        [*task_rows({"data": str(path)}, 2)]
    assert problem in str(refused.value)
    with pytest.raises(UserCodeError, match="not a task of NeMo Gym: "):
        NemoGym("", answer_timeout=1.0, max_turns=8)(prompt({"responses_create_params": params}))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, 'missing required field `data`; expected the file of its tasks: {"data": "tasks.jsonl"}'),
        ({"data": "none.jsonl"}, "no tasks in JSON lines: "),
        ({"data": "a.jsonl", "split": "train"}, "unknown field `split`"),
        ({"data": __file__}, "no tasks in JSON lines: "),
    ],
)
def test_a_file_that_has_no_tasks_is_refused(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        [*task_rows(config, 2)]
    assert problem in str(refused.value)


async def test_a_prompt_without_a_task_is_refused_by_the_flag_that_lacks() -> None:
    with pytest.raises(UserCodeError, match=r"a task as nemo_gym in the prompt's metadata \(--metadata-key\)"):
        NemoGym("", answer_timeout=1.0, max_turns=8)(prompt(None))
