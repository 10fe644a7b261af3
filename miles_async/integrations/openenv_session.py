"""A session with an OpenEnv server: a WebSocket on which an episode is reset and stepped.

Messages follow openenv 0.10, ``openenv.core.env_server.types``, whose dependencies don't fit next to ours.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import msgspec

from miles_async.errors import ServiceUnavailableError, UserCodeError
from miles_async.runtime.texts import shortened
from miles_async.runtime.user_code import wrong_value
from miles_async.types import JsonObject

_FULL = "CAPACITY_REACHED"
_CANNOT_BEGIN = ("FACTORY_ERROR", "SESSION_ERROR")
_FULL_PAUSE = 0.5  # seconds, on average
_END_SECONDS = 2.0  # for the server to answer the end of a session


class Seen(msgspec.Struct, frozen=True):
    """A server's answer to a reset or a step."""

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class _Message(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any]


class ActionRefusedError(UserCodeError):
    """The server says that the environment has no such action."""


class OpenEnvSession:
    """Opened by :meth:`reset`. The server keeps an environment for it until it is closed."""

    def __init__(self, url: str) -> None:
        """``url``: of the server."""
        self._url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers = asyncio.Queue[str | None]()  # None: the connection is closed

    async def reset(self, arguments: JsonObject) -> Seen:
        """Begin an episode; wait while the server has no room for another session. Raises as :meth:`step` does."""
        while True:
            if self._socket is None:
                await self._open()
            seen = await self._ask("reset", arguments)
            if seen is not None:
                return seen
            await self.aclose()
            await asyncio.sleep(_FULL_PAUSE * random.uniform(0.5, 1.5))

    async def step(self, action: JsonObject) -> Seen:
        """Take a step.

        Raises:
            ActionRefusedError: the action doesn't fit the environment.
            UserCodeError: the environment raised, or the answer does not follow the protocol.
            ServiceUnavailableError: the connection ended, or the server can't make environments.
        """
        seen = await self._ask("step", action)
        if seen is None:
            raise ServiceUnavailableError(f"the OpenEnv server {self._url} has no room for this session anymore")
        return seen

    async def aclose(self) -> None:
        """End the session, whatever state it is in."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()
        self._http = self._socket = self._reader = None

    async def _open(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._answers = asyncio.Queue()
        end = aiohttp.ClientWSTimeout(ws_close=_END_SECONDS)
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=0, timeout=end)
        self._reader = asyncio.create_task(self._read(self._socket))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read all the time: only reading answers the pings by which a server sees that a client is there, which a
        turn of the model would outlast.
        """
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                self._answers.put_nowait(message.data)
        self._answers.put_nowait(None)

    async def _ask(self, kind: str, data: JsonObject) -> Seen | None:
        """Send a message and return its answer; None if the server has no room for the session."""
        assert self._socket is not None
        try:
            await self._socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
        except aiohttp.ClientConnectionError:
            pass  # messages sent before it closed the connection are read
        if (answer := await self._answers.get()) is None:
            raise ServiceUnavailableError(
                f"the OpenEnv server {self._url} closed the connection (code {self._socket.close_code}) at a {kind}"
            )
        try:
            message = msgspec.json.decode(answer, type=_Message)
            if message.type == "observation":
                return msgspec.convert(message.data, Seen)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise wrong_value(answer, f"an observation of OpenEnv ({error})") from error
        if message.type != "error":
            raise wrong_value(answer, f"an observation of OpenEnv as the answer to a {kind}")
        code, text = message.data.get("code"), shortened(str(message.data.get("message")))
        if code == _FULL:
            return None
        if code in _CANNOT_BEGIN:
            raise ServiceUnavailableError(f"the OpenEnv server {self._url} began no session: {code}: {text}")
        if code == "VALIDATION_ERROR":
            raise ActionRefusedError(_reasons(message.data.get("errors")) or text)
        raise UserCodeError(f"the environment raised at a {kind}: {code}: {text}")


def _reasons(errors: object) -> str:
    """Pydantic's errors in one line."""
    details = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in details)
