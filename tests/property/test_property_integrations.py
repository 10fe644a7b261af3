"""Whatever the model says to an environment of another package, the tokens that are trained are those it sampled.

# covers: M14, R3
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import gymnasium
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.api import MakeEnvironment
from miles_async.integrations.gymnasium_text import GymnasiumText
from miles_async.integrations.mcp_session import McpServer, McpSession
from miles_async.integrations.mcp_tools import MakeWithTools, McpServers
from miles_async.integrations.nemo_gym_episodes import NemoGym, NemoGymEpisode
from miles_async.integrations.openenv_episodes import OpenEnv, OpenEnvEpisode
from miles_async.integrations.openenv_session import ActionRefusedError, OpenEnvSession, Seen
from miles_async.integrations.tool_calls import Answer
from miles_async.types import JsonObject, Prompt
from tests.fakes.chat_formats import ORDINARY_TOKENS
from tests.fakes.episodes import texts, words
from tests.fakes.faithful import assert_faithful
from tests.fakes.scripted_model import ScriptedModel
from tests.unit.integrations.test_gymnasium_text import Echo, prompt
from tests.unit.rollout.test_multi_turn import ATTEMPT, CHAT, END, generate_with

ECHO = [{"type": "function", "function": {"name": "echo", "description": "", "parameters": {}}}]


def ended(text: str) -> list[int]:
    return [*CHAT.tokenize(text), *END]


def called(tool: str, argument: str) -> list[int]:
    return ended(f'<tool_call>\n{{"name": "{tool}", "arguments": {{"text": "{argument}"}}}}\n</tool_call>')


anything = st.lists(st.integers(0, ORDINARY_TOKENS - 1), min_size=1, max_size=12).flatmap(
    lambda ids: st.sampled_from([ids, [*ids, *END]])
)
Turns = st.SearchStrategy[list[list[int]]]


def turns_of(said: st.SearchStrategy[list[int]]) -> Turns:
    """Turns as a model means them, among others that no tokenizer would make of their text, ended or cut."""
    return st.lists(said | anything, min_size=1, max_size=5)


def episode_is_faithful(make: MakeEnvironment, turns: list[list[int]]) -> None:
    model = ScriptedModel(lambda call, input_ids: turns[min(call, len(turns) - 1)], version=3)
    sample = asyncio.run(generate_with(make, max_turns=len(turns), step_timeout=20.0)(model, ATTEMPT, 0))
    assert_faithful(sample, model, CHAT)


class Saying(McpSession):
    """A session with a server that says whatever is drawn."""

    def __init__(self, answer: Callable[[], str]) -> None:
        super().__init__(McpServer("a server", Path()))
        self._answer = answer

    async def call(self, tool: str, arguments: JsonObject) -> Answer:
        return Answer(self._answer())


class SayingServers(McpServers):
    def __init__(self, answer: Callable[[], str]) -> None:
        super().__init__(["a server"], shared=False, start_timeout=1.0, log_path=Path())
        self.server_of["echo"] = self._servers[0]
        self.tools = ECHO
        self._saying = Saying(answer)

    def session_for(self, tool: str, own: dict[McpServer, McpSession]) -> McpSession:
        return self._saying


@settings(max_examples=40)
@given(data=st.data(), turns=turns_of(st.builds(called, st.sampled_from(["echo", "none"]), words)))
def test_tools_of_mcp_servers(data: st.DataObject, turns: list[list[int]]) -> None:
    episode_is_faithful(MakeWithTools(SayingServers(lambda: data.draw(texts)), None), turns)


@settings(max_examples=40)
@given(turns=turns_of(st.builds(ended, words | st.just("stop"))))
def test_environments_of_gymnasium(turns: list[list[int]]) -> None:
    gymnasium.register("Said-v0", entry_point=Echo)
    try:
        make = GymnasiumText("Said-v0", {})
        episode_is_faithful(lambda given: make(prompt()), turns)
    finally:
        del gymnasium.registry["Said-v0"]


class SayingSession(OpenEnvSession):
    """A session with a server that says and refuses whatever is drawn."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__("")
        self._data = data

    async def reset(self, arguments: JsonObject) -> Seen:
        return Seen(observation={})

    async def step(self, action: JsonObject) -> Seen:
        if self._data.draw(st.booleans()):
            raise ActionRefusedError(self._data.draw(texts))
        return Seen(observation={"result": self._data.draw(texts), "text": self._data.draw(texts)}, reward=0.5)


@settings(max_examples=40)
@given(
    data=st.data(), uses_tools=st.booleans(), turns=turns_of(st.builds(called, words, words) | st.builds(ended, words))
)
def test_environments_of_openenv(data: st.DataObject, uses_tools: bool, turns: list[list[int]]) -> None:
    server = OpenEnv("", {})
    server.tools = ECHO if uses_tools else ()

    def make(given: Prompt) -> OpenEnvEpisode:
        episode = server(given)
        episode._session = SayingSession(data)
        return episode

    episode_is_faithful(make, turns)


class SayingGym(NemoGymEpisode):
    """An episode with a server that says whatever is drawn."""

    data: st.DataObject

    async def _post(self, path: str, body: object) -> tuple[int, str]:
        json.dumps(body)
        if path == "verify":
            return 200, '{"reward": 0.5}'
        return self.data.draw(st.sampled_from([200, 422, 500])) if path == "echo" else 200, self.data.draw(texts)


@settings(max_examples=40)
@given(data=st.data(), turns=turns_of(st.builds(called, st.sampled_from(["echo", "none"]), words)))
def test_tasks_of_nemo_gym(data: st.DataObject, turns: list[list[int]]) -> None:
    function = {"type": "function", **ECHO[0]["function"]}
    task = {"responses_create_params": {"input": "?", "tools": [function]}}
    gym = NemoGym("", answer_timeout=1.0, max_turns=4)

    def make(given: Prompt) -> NemoGymEpisode:
        episode = SayingGym(gym, Prompt(prompt_id="p", token_ids=(1,), text="?", metadata={"nemo_gym": task}))
        episode.data = data
        return episode

    episode_is_faithful(make, turns)
