"""Environments that OpenEnv servers play: what a turn is to them, and whose fault a failure is.

Answers are those that real servers gave, and of servers that misbehave. tests/e2e/test_environment_servers.py compares
the first with real servers, and trains with those.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from miles_async.errors import ConfigurationError, OverdueError, ServiceUnavailableError, UserCodeError
from miles_async.integrations.generate_rows import generated_rows
from miles_async.integrations.openenv_episodes import OpenEnv, OpenEnvEpisode
from miles_async.integrations.openenv_session import ActionRefusedError, OpenEnvSession
from miles_async.runtime.services import is_outage
from miles_async.types import Observation, Prompt
from tests.fakes.environment_servers import openenv, recording, serving
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.turns import calling, thought
from tests.unit.rollout.test_multi_turn import ATTEMPT, generate_with, says
from tests.waiting import until

GAME, TOOLS = recording("openenv_game"), recording("openenv_tools")


def prompt(**metadata: object) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), text="?", metadata=metadata)


def user(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)


@asynccontextmanager
async def started(app: web.Application, **config: object) -> AsyncIterator[OpenEnv]:
    async with serving(app) as url:
        server = OpenEnv(url, config, answer_timeout=20.0)
        await server.start()
        yield server


async def test_prompts_are_first_observations_of_seeds_and_an_episode_begins_with_its_own() -> None:
    async with serving(openenv(GAME)) as url:
        rows = await asyncio.to_thread(generated_rows, "openenv", url, {}, 3, 7)
        assert [row["prompt"] for row in rows] == ["rev 3160", "rev 2917", "rev 4318"]
        assert [row["metadata"]["reset"] for row in rows] == [{"seed": 7}, {"seed": 8}, {"seed": 9}]
        server = OpenEnv(url, {})
        await server.start()
        episode = server(prompt(**rows[0]["metadata"]))
        assert episode.tools() == ()
        first = await episode.step(thought("0613"))
        assert first == Observation(messages=user("rev 5305"), reward=0.5, metrics={"invalid_actions": 0.0})
        last = await episode.step(thought("5"))
        assert (last.done, last.reward) == (True, 0.625)
        await episode.close()
        other = server(prompt(reset={"seed": 7}, begins=rows[1]["metadata"]["begins"]))
        with pytest.raises(UserCodeError, match=r"began with another observation than .*'rev 3160'"):
            await other.step(thought("0613"))
        await other.close()


async def test_what_the_server_refuses_and_raises_is_said_in_its_words() -> None:
    async with serving(openenv(GAME)) as url:
        session = OpenEnvSession(url)
        await session.reset({"seed": 7})
        with pytest.raises(ActionRefusedError, match=r"^digits: Field required; digit: Extra inputs "):
            await session.step({"digit": "1"})
        await session.aclose()
        episode = OpenEnv(url, {})(prompt())
        await episode._session._open()
        with pytest.raises(UserCodeError, match=r"raised at a step: EXECUTION_ERROR: 'Reverse' object has"):
            await episode._session.step({"digits": "1"})
        await episode.close()


async def test_calls_are_answered_by_the_servers_tools() -> None:
    async with started(openenv(TOOLS)) as server:
        episode = server(prompt())
        (tool,) = episode.tools()
        assert tool["function"]["name"] == "calculator"
        assert [*tool["function"]["parameters"]["properties"]] == ["expression"]
        asked = [{"expression": "17*23"}, {}, {"formula": "17*23"}, {"expression": "17"}, "no object"]
        names = ["calculator", "abacus", "calculator", "calculator", "calculator"]
        observed = await episode.step(calling(*zip(names, asked, strict=True)))
        right, unknown, wrong, raised, no_object = [message["content"] for message in observed.messages]
        assert (right, unknown) == ("391", "error: Unknown tool: 'abacus'")
        assert "Missing required argument" in wrong
        assert raised.startswith("error: ")
        assert no_object == "error: expected the arguments to be an object"
        assert observed.messages[1]["tool_call_id"] == "call001"
        assert observed.metrics == {"tool_calls": 5, "tool_errors": 4}
        assert not observed.done
        assert await episode.step(calling(index=1)) == Observation(
            done=True, metrics={"tool_calls": 0, "tool_errors": 0}
        )  # the answer, for the run's reward
        await episode.close()
        with pytest.raises(ConfigurationError, match=r"calls of tools, and .*: give --prompt-data"):
            await asyncio.to_thread(OpenEnv(server.url, {}).rows, 3, 7)


# Servers that tests write.

SESSIONS = web.AppKey("sessions", set)  # those that are open
Reply = Callable[[dict[str, Any], web.WebSocketResponse], Awaitable[object]]
TEXT = {"type": "string"}


def observation(*, reward: float | None = None, done: bool = False, **fields: object) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def saying(
    reply: Reply,
    action: dict[str, Any] | None = None,
    seen: dict[str, Any] | None = None,
    required: tuple[str, ...] = (),
) -> web.Application:
    """A server that ``reply`` makes: its return value is sent, unless it is None. Its actions and observations have the
    given fields.
    """
    app = web.Application()
    app[SESSIONS] = set()

    async def schema(request: web.Request) -> web.Response:
        shown = {"properties": {"done": {}, "reward": {}, "metadata": {}, **(seen or {"text": TEXT})}}
        return web.json_response(
            {"action": {"properties": action or {"text": TEXT}, "required": [*required]}, "observation": shown}
        )

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        app[SESSIONS].add(socket)
        try:
            async for message in socket:
                if (said := await reply(json.loads(message.data), socket)) is not None:
                    await socket.send_str(said if isinstance(said, str) else json.dumps(said))
        finally:
            app[SESSIONS].discard(socket)
        return socket

    app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
    return app


async def echo(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
    return observation(text=json.dumps(message["data"]))


@pytest.mark.parametrize(
    ("fields", "required", "config", "said", "action"),
    [
        ({"text": TEXT}, (), {}, "up", {"text": "up"}),
        ({"text": TEXT, "hint": {"type": "integer"}}, ("text",), {}, "up", {"text": "up"}),
        ({"text": TEXT, "note": TEXT}, ("text",), {}, "up", {"text": "up"}),
        ({"text": TEXT, "note": TEXT}, (), {}, '{"note": "up"}', {"note": "up"}),
        ({"text": {"anyOf": [TEXT, {"type": "null"}]}}, (), {}, "up", {"text": "up"}),
        ({"x": {"type": "integer"}}, ("x",), {}, '{"x": 3}', {"x": 3}),
        ({"text": TEXT, "x": {"type": "integer"}}, ("text", "x"), {}, '{"text": "a", "x": 3}', {"text": "a", "x": 3}),
        ({"one": TEXT, "other": TEXT}, (), {"action": "other"}, "up", {"other": "up"}),
        ({"x": {"type": "integer"}, "text": TEXT}, (), {"action": "x"}, "3", {"x": 3}),
        ({"x": {"type": "integer"}}, (), {"action": "x"}, "three", "Not an action: expected JSON: Expecting value"),
        ({"x": {"type": "integer"}}, (), {}, "[3]", "Not an action: expected a JSON object"),
    ],
)
async def test_a_turn_is_an_action_by_the_schema(
    fields: dict[str, Any], required: tuple[str, ...], config: dict[str, str], said: str, action: object
) -> None:
    async with started(saying(echo, fields, required=required), **config) as server:
        episode = server(prompt())
        observed = await episode.step(thought(said))
        if isinstance(action, str):
            assert observed.messages[0]["content"].startswith(action)
            assert observed.metrics == {"invalid_actions": 1.0}
        else:
            assert json.loads(observed.messages[0]["content"]) == action
        await episode.close()


@pytest.mark.parametrize(
    ("fields", "config", "seen"),
    [
        ({"text": TEXT, "moves": {"type": "array"}}, {}, "ünï"),
        ({"text": TEXT, "moves": {"type": "array"}}, {"observation": "moves"}, "[1, 2]"),
        ({"text": TEXT, "error": TEXT, "moves": {}}, {}, '{"text": "ünï", "moves": [1, 2]}'),
    ],
)
async def test_the_model_reads_the_text_of_an_observation_or_all_of_it(
    fields: dict[str, Any], config: dict[str, str], seen: str
) -> None:
    async def shows(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        return observation(text="ünï", moves=[1, 2], metadata={"hidden": 1})

    async with started(saying(shows, seen=fields), **config) as server:
        episode = server(prompt())
        assert (await episode.step(thought("a"))).messages == user(seen)
        await episode.close()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"action": "move"}, "--environment-config: expected one of text as action, found 'move'"),
        ({"observation": "board"}, "--environment-config: expected one of text as observation, found 'board'"),
    ],
)
async def test_a_field_that_the_server_does_not_have_is_refused(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        async with started(saying(echo), **config):
            pass
    assert str(refused.value) == problem


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="unknown field `moves`; expected action, observation, reset"):
        OpenEnv("http://127.0.0.1:1", {"moves": "a"})


async def test_what_is_no_openenv_server_is_refused_when_the_run_starts() -> None:
    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(600)
        raise AssertionError

    async with serving(web.Application()) as url:
        for address, problem in ((url, "404"), ("http://127.0.0.1:1", "Cannot connect")):
            with pytest.raises(ConfigurationError, match=rf"OpenEnv server at {address} \(--environment\).*{problem}"):
                await OpenEnv(address, {}).start()
    app = web.Application()
    app.router.add_get("/schema", hangs)
    async with serving(app) as url:
        with pytest.raises(ConfigurationError, match=r"found nothing within 0\.2 s"):
            await OpenEnv(url, {}, answer_timeout=0.2).start()


async def test_an_environment_that_heeds_no_seed_has_no_prompts() -> None:
    numbers = iter(range(100))

    async def counts(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        return observation(text=f"{next(numbers)}")

    async with serving(saying(counts)) as url:
        with pytest.raises(ConfigurationError, match="two resets to seed 7 began with different observations"):
            await asyncio.to_thread(OpenEnv(url, {}).rows, 3, 7)


async def test_arguments_of_reset_are_those_of_all_and_of_the_prompt() -> None:
    async with started(saying(echo), reset={"split": "train"}) as server:
        (row,) = await asyncio.to_thread(OpenEnv(server.url, {"reset": {"split": "train"}}).rows, 1, 7)
        assert json.loads(row["prompt"]) == {"split": "train", "seed": 7}
    resets: list[object] = []

    async def notes(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        resets.append(message["data"])
        return observation(text="")

    async with started(saying(notes), reset={"split": "train"}) as server:
        for metadata in ({}, {"reset": {"index": 7}}):
            episode = server(prompt(**metadata))
            await episode.step(thought("a"))
            await episode.close()
        assert resets[::2] == [{"split": "train"}, {"split": "train", "index": 7}]
        with pytest.raises(UserCodeError, match="expected an object as reset in the prompt's metadata, found 7"):
            await server(prompt(reset=7)).step(thought("a"))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("hello", r"returned 'hello', expected an observation of OpenEnv \(JSON is malformed"),
        ("[1]", "expected an observation of OpenEnv"),
        (observation(text=7, reward="much"), "expected an observation of OpenEnv .*Expected `bool"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "expected an observation of OpenEnv"),
        ({"type": "observation", "data": {"reward": 1}}, "missing required field `observation`"),
        ({"type": "state", "data": {}}, "expected an observation of OpenEnv as the answer to a step"),
        (observation(board=1), "expected an observation with the field 'text'"),
    ],
)
async def test_nonsense_costs_the_attempt(said: object, problem: str) -> None:
    async def answers(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        return said if message["type"] == "step" else observation(text="go")

    async with started(app := saying(answers)) as server:
        episode = server(prompt())
        with pytest.raises(UserCodeError, match=problem):
            await episode.step(thought("a"))
        await episode.close()
        await until(lambda: not app[SESSIONS])


async def test_a_connection_that_ends_in_a_step_is_a_service_that_is_down() -> None:
    # covers: C6
    async def leaves(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        if message["type"] == "step":
            await socket.close(code=1011)
            return None
        return observation(text="go")

    async with started(app := saying(leaves)) as server:
        episode = server(prompt())
        with pytest.raises(ServiceUnavailableError, match=r"closed the connection \(code 1011\) at a step"):
            await episode.step(thought("a"))
        await episode.close()
        await until(lambda: not app[SESSIONS])
    late = server(prompt())  # the server is gone
    with pytest.raises(OSError, match="Cannot connect") as down:
        await late.step(thought("a"))
    assert is_outage(down.value)
    await late.close()


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
async def test_a_server_that_makes_no_environment_is_down(code: str) -> None:
    # covers: C6
    async def fails(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        return {"type": "error", "data": {"code": code, "message": "no container"}}

    async with started(saying(fails)) as server:
        episode = server(prompt())
        with pytest.raises(ServiceUnavailableError, match=f"began no session: {code}: no container"):
            await episode.step(thought("a"))
        await episode.close()


async def test_a_step_that_hangs_costs_its_attempt_and_its_session_ends() -> None:
    async def hangs(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        return None if message["type"] == "step" else observation(text="go")

    async with started(app := saying(hangs)) as server:
        generate = generate_with(lambda given: server(prompt()), step_timeout=0.5)
        with pytest.raises(OverdueError):
            await generate(ScriptedModel(says("a")), ATTEMPT, 0)
        await until(lambda: not app[SESSIONS])


async def test_episodes_wait_until_the_server_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.integrations.openenv_session._FULL_PAUSE", 0.02)
    refused = 0

    async def one_at_a_time(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        nonlocal refused
        if len(app[SESSIONS]) == 1:
            return observation(text="go", reward=1.0)
        refused += 1
        error = {"code": "CAPACITY_REACHED", "message": "1/1 sessions", "active_sessions": 1, "max_sessions": 1}
        await socket.send_json({"type": "error", "data": error})
        await socket.close()
        return None

    async with started(app := saying(one_at_a_time)) as server:
        first = server(prompt())
        await first.step(thought("a"))
        waiting = server(prompt())
        step = asyncio.create_task(waiting.step(thought("a")))
        await until(lambda: refused >= 2)
        await first.close()
        assert (await asyncio.wait_for(step, 20)).reward == 1.0
        await waiting.close()
        await until(lambda: not app[SESSIONS])


async def test_pings_are_answered_while_the_model_speaks() -> None:
    ponged = asyncio.Event()

    async def pings(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        if message["type"] == "step":
            await socket.ping(b"?")
        return observation(text="go")

    app = saying(pings)

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is web.WSMsgType.PONG:
                ponged.set()
            elif message.type is web.WSMsgType.TEXT:
                await socket.send_json(await pings(json.loads(message.data), socket))
        return socket

    app.router.add_get("/own/ws", session)
    async with serving(app) as url:
        alone = OpenEnvSession(f"{url}/own")
        await alone.reset({})
        await alone.step({})
        await asyncio.wait_for(ponged.wait(), 20)  # without another step
        await alone.aclose()


async def test_a_megabyte_is_an_observation_and_ends_an_episode_that_has_no_room_for_it() -> None:
    async def long(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        text = "x" * (1_000_000 if message["type"] == "step" else 5_000_000)
        return observation(text=text, reward=0.5 if message["type"] == "step" else None)

    async with started(app := saying(long)) as server:
        sample = await generate_with(lambda given: server(prompt()), step_timeout=60.0)(
            ScriptedModel(says("a")), ATTEMPT, 0
        )
        assert (sample.finish_reason, sample.reward) == ("length", 0.5)
        await until(lambda: not app[SESSIONS])


async def test_two_hundred_episodes_at_once_have_a_session_each() -> None:
    async def counts(message: dict[str, Any], socket: web.WebSocketResponse) -> object:
        if message["type"] == "reset":
            seeds[socket] = message["data"]["seed"]
        return observation(text=f"{seeds[socket]} {message['type']}")

    async def plays(episode: OpenEnvEpisode) -> list[str]:
        texts = [(await episode.step(thought("a"))).messages[0]["content"] for _ in range(2)]
        await episode.close()
        return texts

    seeds: dict[web.WebSocketResponse, int] = {}
    async with started(app := saying(counts)) as server:
        played = await asyncio.gather(*(plays(server(prompt(reset={"seed": seed}))) for seed in range(200)))
        assert played == [[f"{seed} step"] * 2 for seed in range(200)]
        await until(lambda: not app[SESSIONS])
