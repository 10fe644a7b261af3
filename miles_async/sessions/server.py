"""The session server: protocols that agents speak, token-in-token-out trajectories for the trainer.

::

    POST /sessions                             create (the run does; msgpack)
    POST /sessions/{id}/v1/chat/completions    for agents, with any client of these APIs
    POST /sessions/{id}/v1/responses
    POST /sessions/{id}/v1/messages
    POST /sessions/{id}/v1/messages/count_tokens
    POST /sessions/{id}/heartbeat              keep an idle session open
    POST /sessions/{id}/finish                 {"reward": 1.0, "parts": {"right": 1.0}} or less: the agent is done
    POST /sessions/{id}/abort                  {"reason": "..."}: do not train on the session
    POST /sessions/{id}/collect                end it and return its sample (the run does; msgpack)
    GET  /sessions/{id}, GET /health           status

The run's requests need the run's key, all others that or the agents' key (``middleware.py``).

One process with one event loop; long work on tokens runs in threads. Nothing is stored: when the process dies, its open
sessions are lost, and their samples are generated again.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from miles_async.api import EngineClient
from miles_async.errors import TransientEngineError
from miles_async.runtime.clock import now
from miles_async.runtime.network.keys import SessionKeys
from miles_async.runtime.network.ports import bind_port
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.answering import Answering
from miles_async.sessions.middleware import as_json, gone, locked, read_object
from miles_async.sessions.protocols import chat_completions, messages, responses
from miles_async.sessions.protocols.exchange import Read
from miles_async.sessions.session import Session, SessionSettings
from miles_async.trajectory.taker import MakeTrajectory, TurnTaker
from miles_async.types import CollectedSession, JsonObject, OpenSession, RewardParts, Sample
from miles_async.types.shared_pictures import slim

P = ParamSpec("P")
T = TypeVar("T")

_MAX_BODY = 1 << 20  # of the run's requests; conversations have a separate limit
_BACKLOG = 4096  # agents of a whole batch may connect at once
_THREADS = 2  # for long work on tokens; more would only compete for the interpreter


class SessionServer:
    """The sessions, and the application that serves them."""

    def __init__(
        self,
        client: EngineClient,
        make_trajectory: MakeTrajectory,
        *,
        keys: SessionKeys,
        session_timeout: float,
    ) -> None:
        """``session_timeout``: seconds without a request or heartbeat after which a session expires."""
        self.instance_id = uuid.uuid4().hex
        self.url = ""
        self._client = client
        self._make_trajectory = make_trajectory
        self._keys = keys
        self._session_timeout = session_timeout
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens")
        self._sessions: dict[str, Session] = {}
        self._began: dict[str, int] = {}  # since the last call of ``began``
        self._counts: Counter[str] = Counter()
        self._answering = Answering(self.instance_id, self._counts, self._in_thread)
        self._runner: web.AppRunner | None = None

    def _note(self, session_id: str, version: int) -> None:
        self._began.setdefault(session_id, version)

    def began(self) -> dict[str, int]:
        """Sessions that kept turns since the last call, each with the version of a token that carries loss."""
        began, self._began = self._began, {}
        return began

    # -------------------------------------------------------------------------------------------- life
    async def start(self, host: str, ports: range | None = None, tls: Tls | None = None) -> None:
        """Listen at ``host``, the address that agents are given, on a free port (of ``ports`` if given)."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[as_json, locked(self._keys)])
        app.add_routes(
            [
                # First, since they are tried in turn.
                web.post("/sessions/{id}/v1/chat/completions", partial(self._answer, chat_completions.read)),
                web.post("/sessions/{id}/v1/messages", partial(self._answer, messages.read)),
                web.post("/sessions/{id}/v1/responses", partial(self._answer, responses.read)),
                web.post("/sessions/{id}/v1/messages/count_tokens", self._count),
                web.get("/health", self._health),
                web.post("/sessions", self._create),
                web.get("/sessions/{id}", self._status),
                web.post("/sessions/{id}/heartbeat", self._heartbeat),
                web.post("/sessions/{id}/finish", self._finish),
                web.post("/sessions/{id}/abort", self._abort),
                web.post("/sessions/{id}/collect", self._collect),
                web.get("/sessions/{id}/v1/models", self._models),
                web.get("/sessions/{id}/v1/models/{model:.+}", self._one_model),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        with bind_port(host, ports) as listener:
            self.url = f"{'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}"
            context = None if tls is None else tls.server()
            await web.SockSite(self._runner, listener.dup(), backlog=_BACKLOG, ssl_context=context).start()

    async def expire(self) -> None:
        """End idle sessions, forever."""
        while True:
            await asyncio.sleep(min(1.0, self._session_timeout / 4))
            for session_id, session in list(self._sessions.items()):
                idle = session.idle_seconds()
                if session.ending == "open" and idle > self._session_timeout:
                    session.end("expired", f"no request or heartbeat for {idle:.0f} s (--session-timeout)")
                    self._counts["expired"] += 1
                elif idle > 3 * self._session_timeout:  # it will not be collected
                    del self._sessions[session_id]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *arguments, **named))

    # ---------------------------------------------------------------------------------------- sessions
    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "instance_id": self.instance_id,
                "pid": os.getpid(),
                "open_sessions": sum(session.ending == "open" for session in self._sessions.values()),
                **{name: self._counts[name] for name in _COUNTED},
            }
        )

    async def _create(self, request: web.Request) -> web.Response:
        settings = decode(await request.read(), SessionSettings)
        session_id = uuid.uuid4().hex
        taker = TurnTaker(
            trajectory=self._make_trajectory(),
            client=self._client,
            sampling=settings.sampling,
            limits=settings.limits,
            routing_key=settings.routing_key,
            in_thread=self._in_thread,
            began=partial(self._note, session_id),
        )
        self._sessions[session_id] = Session(session_id, taker, may_constrain=settings.may_constrain)
        self._counts["created"] += 1
        url = f"{self.url}/sessions/{session_id}"
        opened = OpenSession(session_id=session_id, instance_id=self.instance_id, url=url, base_url=f"{url}/v1")
        return web.Response(body=encode(opened))

    def _session(self, request: web.Request, *, must_be_open: bool = True) -> Session:
        session_id = request.match_info["id"]
        session = self._sessions.get(session_id)
        if session is None:
            what = f"no session {session_id} at server {self.instance_id}: it is over, or the server was restarted"
            raise gone(web.HTTPNotFound, what, "unknown_session")
        if must_be_open and session.ending != "open":
            what = f"session {session_id} is over: {session.ending} {session.reason}".strip()
            raise gone(web.HTTPGone, what, f"session_{session.ending}")
        return session

    async def _status(self, request: web.Request) -> web.Response:
        session = self._session(request, must_be_open=False)
        turns = session.taker.trajectory.turns
        return web.json_response(
            {
                "session_id": session.session_id,
                "instance_id": self.instance_id,
                "ending": session.ending,
                "reason": session.reason,
                "turns": len(turns),
                "prompt_tokens": sum(turn.sampled.prompt_tokens for turn in turns),
                "cached_tokens": sum(turn.sampled.cached_tokens for turn in turns),
                "sampled_tokens": sum(len(turn.sampled.output_ids) for turn in turns),
                "idle_seconds": session.idle_seconds(),
            }
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._session(request).last_used = now()
        return web.json_response({"instance_id": self.instance_id})

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        expected = '{"reward": a number}, with "parts": {name: number} if you like, or {}'
        given = await read_object(request, expected, _Finish)
        session.reward = given.reward
        if given.reward is not None and given.parts:
            session.reward = RewardParts(reward=given.reward, parts=given.parts)
        session.end("finished")
        self._counts["finished"] += 1
        return web.json_response({"session_id": session.session_id, "reward": given.reward})

    async def _abort(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.end("aborted", (await read_object(request, '{"reason": "a text"} or {}', _Abort)).reason)
        self._counts["aborted"] += 1
        return web.json_response({"session_id": session.session_id})

    async def _collect(self, request: web.Request) -> web.Response:
        session = self._session(request, must_be_open=False)
        session.end("finished")
        del self._sessions[session.session_id]  # so that no late request revives it
        return web.Response(body=await self._in_thread(_collected, session))

    # -------------------------------------------------------------------------------------------- agents
    async def _answer(self, read: Read, request: web.Request) -> web.StreamResponse:
        return await self._answering.answer(request, self._session(request), read)

    async def _count(self, request: web.Request) -> web.Response:
        return await self._answering.count(request, self._session(request))

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        policy = _model("policy")
        pages = {"has_more": False, "first_id": policy["id"], "last_id": policy["id"]}
        return web.json_response({"object": "list", "data": [policy], **pages})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(_model(request.match_info["model"]))


def _collected(session: Session) -> bytes:
    sample: Sample | None = None
    failure = session.failure
    try:
        sample = session.taker.trajectory.sample("length" if session.cut else None)
        if sample is not None:
            (sample,) = slim([sample])
    except TransientEngineError as error:
        failure = str(error)
    return encode(
        CollectedSession(
            ending=session.ending,
            sample=sample,
            reward=session.reward,
            cut=session.cut,
            failure=failure,
            waiting=session.waiting,
        )
    )


def _model(model_id: str) -> JsonObject:
    """A model, as OpenAI and Anthropic describe theirs."""
    openai = {"object": "model", "created": 0, "owned_by": "miles_async"}
    anthropic = {"type": "model", "display_name": model_id, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": model_id, **openai, **anthropic}


_COUNTED = (
    *("created", "finished", "aborted", "expired"),
    *("turns", "prompt_tokens", "cached_tokens", "sampled_tokens"),
)


class _Finish(msgspec.Struct):
    reward: float | None = None
    parts: dict[str, float] = {}

    def __post_init__(self) -> None:
        if self.parts and self.reward is None:
            raise ValueError("parts without a reward")


class _Abort(msgspec.Struct):
    reason: str = ""
