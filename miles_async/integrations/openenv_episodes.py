"""``--environment openenv:URL``: an environment that an OpenEnv server plays.

Its prompts are the first observations of as many seeds. A turn is an action by what the server's schema says: the text
of its one field, a JSON object of several, or calls of tools.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import aiohttp
import msgspec

from miles_async.errors import ConfigurationError, UserCodeError
from miles_async.integrations.openenv_session import ActionRefusedError, OpenEnvSession, Seen
from miles_async.integrations.tool_calls import Answer, answered, described, no_server
from miles_async.runtime.user_code import wrong_value
from miles_async.types import AssistantTurn, JsonObject, Observation, Prompt

T = TypeVar("T")

_EVERY = ("metadata", "done", "reward")  # fields that all actions or observations have


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str | None = None  # field that the model's text is
    observation: str | None = None  # field that the model reads
    reset: JsonObject = {}  # further arguments of every reset


class _Schemas(msgspec.Struct, frozen=True):
    """JSON schemas of what the server takes and gives."""

    action: dict[str, Any]
    observation: dict[str, Any]


class OpenEnv:
    """A MakeEnvironment for one server, its prompts, and a service of the run that first reads the server's schema."""

    def __init__(self, url: str, config: Mapping[str, Any], *, answer_timeout: float = 60.0) -> None:
        """``answer_timeout``: seconds for the first answers. Raises ConfigurationError for unknown settings."""
        self.url = url
        self._answer_timeout = answer_timeout
        try:
            self.settings = msgspec.convert(config, _Settings)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"--environment-config: {error}; expected action, observation, reset") from None
        self.tools: Sequence[JsonObject] = ()  # as chat completions describe them
        self._action: str | None = None  # None: an object with all fields
        self._action_is_text = True
        self._observation: str | None = None  # None: an object with all fields

    async def start(self) -> None:
        """Read the schema. Raises ConfigurationError if no server answers, or one with other fields than the settings
        name.
        """
        schemas = await self._answered(self._schemas())
        if _property(schemas.action, "type").get("const") == "call_tool":
            self.tools = await self._answered(self._listed())
            return
        self._action = _field(schemas.action, self.settings.action, "action")
        self._observation = _field(schemas.observation, self.settings.observation, "observation")
        self._action_is_text = self._action is not None and _is_text(_property(schemas.action, self._action))

    async def supervise(self) -> None:
        """Nothing to do: the run does not own the server."""

    async def stop(self) -> None:
        """Nothing to do: every episode closes its session."""

    def rows(self, count: int, seed: int) -> Iterator[JsonObject]:
        """Return prompts: the first observations of the seeds from ``seed`` on. Raises ConfigurationError."""
        return iter(asyncio.run(self._rows(count, seed)))

    def __call__(self, prompt: Prompt) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, prompt)

    def action(self, text: str) -> JsonObject:
        """Read an action from the model's answer. Raises ActionRefusedError if it has none."""
        if self._action_is_text and self._action is not None:
            return {self._action: text}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ActionRefusedError(f"expected JSON: {error}") from None
        if self._action is not None:
            return {self._action: value}
        if not isinstance(value, dict):
            raise ActionRefusedError("expected a JSON object")
        return value

    def text(self, observation: JsonObject) -> str:
        """Return the text that the model reads. Raises UserCodeError if the observation lacks the schema's field."""
        if self._observation is None:
            return _json({name: value for name, value in observation.items() if name not in _EVERY})
        if self._observation not in observation:
            raise wrong_value(observation, f"an observation with the field {self._observation!r}")
        value = observation[self._observation]
        return value if isinstance(value, str) else _json(value)

    async def _rows(self, count: int, seed: int) -> list[JsonObject]:
        await self.start()
        if self.tools:
            raise ConfigurationError(
                "its actions are calls of tools, and no observation says what to do with them: give --prompt-data"
            )
        resets = [{**self.settings.reset, "seed": number} for number in range(seed, seed + count)]
        (first,), texts = [await self._first_texts(some) for some in (resets[:1], resets)]
        if first != texts[0]:
            raise ConfigurationError(
                f"two resets to seed {seed} began with different observations: give --prompt-data, and there what "
                "decides an episode as reset in the metadata (docs/environments.md); found "
                f"{first[:200]!r}, {texts[0][:200]!r}"
            )
        return [
            {"prompt": text, "metadata": {"reset": reset, "begins": _digest(text)}}
            for reset, text in zip(resets, texts, strict=True)
        ]

    async def _first_texts(self, resets: Sequence[JsonObject]) -> list[str]:
        async with aclosing(OpenEnvSession(self.url)) as session:
            seen = [await self._answered(session.reset(reset)) for reset in resets]
        return [self.text(each.observation) for each in seen]

    async def _schemas(self) -> _Schemas:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/schema", raise_for_status=True) as response:
            return msgspec.json.decode(await response.read(), type=_Schemas)

    async def _listed(self) -> list[JsonObject]:
        async with aclosing(OpenEnvSession(self.url)) as session:
            await session.reset(self.settings.reset)
            listed = (await session.step({"type": "list_tools"})).observation["tools"]
        return [described(tool["name"], tool.get("description"), tool["input_schema"]) for tool in listed]

    async def _answered(self, asking: Coroutine[object, object, T]) -> T:
        """Await an answer of the server before any episode. Raises ConfigurationError for any failure."""
        try:
            async with asyncio.timeout(self._answer_timeout):
                return await asking
        except Exception as error:  # the server is third-party code: any error is shown with the flag
            raise no_server("an OpenEnv server", self.url, error, self._answer_timeout) from error


class OpenEnvEpisode:
    """One episode. Its reward is the sum over its steps; None if no step gave one."""

    def __init__(self, server: OpenEnv, prompt: Prompt) -> None:
        self._server = server
        self._metadata = prompt.metadata
        self._session = OpenEnvSession(server.url)
        self._begun = False
        self._reward: float | None = None

    def tools(self) -> Sequence[JsonObject]:
        """The server's tools, if its actions are calls of tools."""
        return self._server.tools

    async def step(self, turn: AssistantTurn) -> Observation:
        """Take the turn as an action, or its calls as one each. Raises as OpenEnvSession.step does."""
        if not self._begun:
            await self._begin()
        if self._server.tools:
            return await self._call(turn)
        try:
            seen = await self._session.step(self._server.action(str(turn.message.get("content") or "")))
        except ActionRefusedError as error:
            messages = ({"role": "user", "content": f"Not an action: {error}"},)
            return Observation(messages=messages, reward=self._reward, metrics={"invalid_actions": 1.0})
        self._add(seen)
        messages = ({"role": "user", "content": self._server.text(seen.observation)},)
        return Observation(messages=messages, done=seen.done, reward=self._reward, metrics={"invalid_actions": 0.0})

    async def close(self) -> None:
        """End the session; the server closes its environment."""
        await self._session.aclose()

    async def _begin(self) -> None:
        """Reset as the prompt's metadata say, after the model's first turn: earlier ones would hold a session."""
        given = self._metadata.get("reset", {})
        if not isinstance(given, Mapping):
            raise UserCodeError(f"expected an object as reset in the prompt's metadata, found {given!r}")
        seen = await self._session.reset(reset := {**self._server.settings.reset, **given})
        begins = self._metadata.get("begins")
        if begins is not None and _digest(found := self._server.text(seen.observation)) != begins:
            raise UserCodeError(
                f"reset({reset}) began with another observation than the prompt's: it must decide it; found "
                f"{found[:200]!r}"
            )
        self._begun = True

    async def _call(self, turn: AssistantTurn) -> Observation:
        """Make calls in their order; the first turn without one is the answer."""
        calls: Sequence[JsonObject] = turn.message.get("tool_calls", ())
        messages, metrics, ended = await answered(calls, self._called)
        return Observation(messages=tuple(messages), done=ended or not calls, reward=self._reward, metrics=metrics)

    async def _called(self, tool: str, arguments: JsonObject) -> Answer:
        try:
            seen = await self._session.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
        except ActionRefusedError as error:
            return Answer(f"error: {error}", is_error=True)
        self._add(seen)
        match seen.observation:
            case {"error": {"message": str(problem)}}:
                return Answer(f"error: {problem}", is_error=True, ends=seen.done)
            case {"result": {"content": [*parts]} as result}:
                texts = [part["text"] if isinstance(part.get("text"), str) else _json(part) for part in parts]
                return Answer("\n".join(texts), is_error=bool(result.get("is_error")), ends=seen.done)
            case {"result": result}:
                return Answer(result if isinstance(result, str) else _json(result), ends=seen.done)
        return Answer(self._server.text(seen.observation), ends=seen.done)

    def _add(self, seen: Seen) -> None:
        if seen.reward is not None:
            self._reward = (self._reward or 0.0) + seen.reward


def _field(schema: JsonObject, wanted: str | None, kind: str) -> str | None:
    """The field that a text is: the wanted one, the only one that an action needs, or the only one that has texts; None
    if all fields are an object.

    Raises ConfigurationError if there is no such field.
    """
    names = [name for name in schema.get("properties", {}) if name not in _EVERY]
    if wanted is not None:
        if wanted not in names:
            raise ConfigurationError(
                f"--environment-config: expected one of {', '.join(names)} as {kind}, found {wanted!r}"
            )
        return wanted
    texts = [name for name in names if _is_text(_property(schema, name))]
    needed = [name for name in schema.get("required", ()) if name in names] if kind == "action" else []
    chosen = needed or texts
    return chosen[0] if len(chosen) == 1 and chosen[0] in texts else None


def _property(schema: JsonObject, name: str) -> JsonObject:
    found = schema.get("properties", {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: JsonObject) -> bool:
    return "string" in [schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
