"""``--environment nemo-gym:URL``: tasks whose tools and reward a resources server of NeMo Gym has.

An episode is what NeMo Gym's simple agent does: ``/seed_session``, a request per call of a tool, ``/verify``, with the
cookies of one session. Tasks are rows of NeMo Gym's data sets, whose prompts and tools are requests of the Responses
API. The protocol is nemo-gym's, 0.4 to 0.7, whose dependencies don't fit next to ours.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec

from miles_async.errors import ConfigurationError, ServiceUnavailableError, TrajectoryError, UserCodeError
from miles_async.integrations.tool_calls import Answer, answered, no_server
from miles_async.runtime.texts import shortened
from miles_async.runtime.user_code import wrong_value
from miles_async.sessions.protocols.exchange import Surroundings
from miles_async.sessions.protocols.responses import Answer as Response
from miles_async.sessions.protocols.responses_request import ResponsesRequest
from miles_async.types import AssistantTurn, JsonObject, Observation, Prompt

_ROW = "nemo_gym"  # key of a task in a prompt's metadata
_DOWN = (429, 502, 503, 504)  # not 500, which is an exception of the environment's


class _Verified(msgspec.Struct, frozen=True):
    reward: float | bool
    mask_sample: bool = False  # since 0.7: the environment failed, and the reward says nothing
    failure_reason: str | None = None


@dataclass(frozen=True, slots=True)
class NemoGym:
    """A MakeEnvironment for one resources server, and a service of the run that first looks whether it is one."""

    url: str
    _: KW_ONLY
    answer_timeout: float  # seconds for the first answer
    max_turns: int  # of an episode; its last one is verified

    async def start(self) -> None:
        """Raises ConfigurationError if no resources server answers."""
        timeout = aiohttp.ClientTimeout(total=self.answer_timeout)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                async with http.get(f"{self.url}/openapi.json", raise_for_status=True) as response:
                    paths = [*(await response.json())["paths"]]
        except Exception as error:  # the server is third-party code: any error is shown with the flag
            raise no_server("a resources server of NeMo Gym", self.url, error, self.answer_timeout) from error
        if missing := {"/seed_session", "/verify"} - {*paths}:
            stepped = "; servers with /reset and /step (GymnasiumServer) are not supported" if "/step" in paths else ""
            raise ConfigurationError(
                f"expected a resources server of NeMo Gym at {self.url} (--environment), found one without "
                f"{' and '.join(sorted(missing))}{stepped}"
            )

    async def supervise(self) -> None:
        """Nothing to do: the run does not own the server."""

    async def stop(self) -> None:
        """Nothing to do: every episode closes its session."""

    def __call__(self, prompt: Prompt) -> NemoGymEpisode:
        return NemoGymEpisode(self, prompt)


class NemoGymEpisode:
    """One episode. Turns with calls are answered by the server's tools; the first other one is verified."""

    def __init__(self, server: NemoGym, prompt: Prompt) -> None:
        """Raises UserCodeError for a prompt that is not a task of NeMo Gym."""
        self._server = server
        if not isinstance(task := prompt.metadata.get(_ROW), Mapping):
            raise UserCodeError(f"expected a task as {_ROW} in the prompt's metadata (--metadata-key)")
        self._task = task
        try:
            self._request, _, self._tools = _read(task)
        except TrajectoryError as error:
            raise UserCodeError(f"not a task of NeMo Gym: {error}") from error
        self._http: aiohttp.ClientSession | None = None
        self._output: list[JsonObject] = []  # items of the response that is verified

    def tools(self) -> Sequence[JsonObject]:
        """The task's tools."""
        return self._tools

    async def step(self, turn: AssistantTurn) -> Observation:
        """Call tools, or verify.

        Raises:
            UserCodeError: the environment raised, or its answer does not follow the protocol.
            ServiceUnavailableError, aiohttp.ClientConnectionError: the server is down, or says that it failed.
        """
        if self._http is None:
            self._http = aiohttp.ClientSession(
                cookie_jar=aiohttp.CookieJar(unsafe=True),  # they name the server's session; unsafe: of a plain address
                connector=aiohttp.TCPConnector(force_close=True),  # servers close idle ones, and after an exception
                timeout=aiohttp.ClientTimeout(total=None),
            )
            await self._expected("seed_session", self._task)
        cut = turn.finish_reason == "length"
        answer = Response(self._request, f"resp_{turn.index}", int(time.time()))
        self._output += answer.items(turn.message)
        calls: Sequence[JsonObject] = () if cut else turn.message.get("tool_calls", ())
        if not calls:
            return Observation(done=True, reward=await self._verify(answer, cut=cut))
        messages, metrics, _ = await answered(calls, self._called)
        self._output += [
            {"type": "function_call_output", "call_id": each["tool_call_id"], "output": each["content"]}
            for each in messages
        ]
        is_last = turn.index + 1 == self._server.max_turns
        return Observation(
            messages=tuple(messages),
            reward=await self._verify(answer) if is_last else 0.0,  # the reward if there is no room for another turn
            metrics=metrics,
        )

    async def close(self) -> None:
        """Close the connection; servers forget sessions by themselves."""
        if self._http is not None:
            await self._http.close()

    async def _called(self, tool: str, arguments: JsonObject) -> Answer:
        """The answer of a tool: the model reads the text of an error status."""
        if tool not in [each["function"]["name"] for each in self._tools]:
            return Answer(f"error: there is no tool {tool!r}", is_error=True)
        status, text = await self._post(tool, arguments)
        return Answer(text, is_error=status >= 400)

    async def _verify(self, answer: Response, *, cut: bool = False) -> float:
        response = {**answer.begun("incomplete" if cut else "completed"), "output": self._output}
        text = await self._expected("verify", {**self._task, "response": response})
        try:
            verified = msgspec.json.decode(text, type=_Verified)
        except (msgspec.DecodeError, RecursionError) as error:
            raise wrong_value(text, f"a reward of /verify ({error})") from error
        if verified.mask_sample:
            raise ServiceUnavailableError(
                f"the NeMo Gym server {self._server.url} failed to verify: {shortened(str(verified.failure_reason))}"
            )
        return verified.reward

    async def _expected(self, path: str, body: object) -> str:
        """Post, and return the answer. Raises UserCodeError for a status that is an error."""
        status, text = await self._post(path, body)
        if status >= 400:
            raise UserCodeError(f"the environment refused /{path} with status {status}: {shortened(text)}")
        return text

    async def _post(self, path: str, body: object) -> tuple[int, str]:
        assert self._http is not None
        try:
            async with self._http.post(
                f"{self._server.url}/{path}",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                status, text = response.status, await response.text(errors="replace")
        except aiohttp.ClientPayloadError as error:  # it ended in the middle of an answer
            raise ServiceUnavailableError(f"the NeMo Gym server {self._server.url} at /{path}: {error}") from error
        if status in _DOWN:
            raise ServiceUnavailableError(
                f"the NeMo Gym server {self._server.url} answered /{path} with status {status}: {shortened(text)}"
            )
        return status, text


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str  # file of tasks, a JSON line each


def task_rows(config: Mapping[str, Any], count: int) -> Iterator[JsonObject]:
    """Yield the first tasks of the file that the settings name as prompts. Raises ConfigurationError."""
    try:
        path = Path(msgspec.convert(config, _Settings).data)
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(filter(str.strip, lines), count), 1):
                task = json.loads(line)
                try:
                    _, messages, _ = _read(task)
                except TrajectoryError as error:
                    raise ConfigurationError(f"{path}, task {number}: {error}") from error
                yield {"prompt": messages, "metadata": {_ROW: task}}
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"--environment-config: {error}; expected the file of its tasks: " + '{"data": "tasks.jsonl"}'
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--environment-config: no tasks in JSON lines: {error}") from error


def _read(task: object) -> tuple[ResponsesRequest, list[JsonObject], Sequence[JsonObject]]:
    """The request that a task is, with its messages and tools. Raises TrajectoryError for unsupported fields."""
    params = task.get("responses_create_params") if isinstance(task, Mapping) else None
    try:
        request = msgspec.convert(params, ResponsesRequest)
    except msgspec.ValidationError as error:
        raise TrajectoryError(f"responses_create_params: {error}") from error
    asked = request.turn((), Surroundings(answer_id="", decode=str))
    if asked.constraint is not None:
        raise TrajectoryError("responses_create_params: tool_choice and text.format are not supported")
    given = cast("Sequence[JsonObject]", asked.messages)
    messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in given]
    return request, messages, asked.tools
