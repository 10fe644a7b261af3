"""The router (smg, a subprocess) spreads requests over the engines registered with it, and does nothing else.

Its health checks, retries, overload protection and circuit breakers are off: ``registry.py`` alone decides which
engines serve, the client retries with a fresh request id, and a paused engine is healthy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec
import structlog

from miles_async.engines.http import ERROR_TEXT, Http, decode_json
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.network.addresses import LOCAL, LOOPBACK, Network
from miles_async.runtime.network.keys import EngineKeys, require_keys
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.restarts import RestartBudget
from miles_async.runtime.tasks import gathered

log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1
_CALL_TIMEOUT = aiohttp.ClientTimeout(total=10)
_FOREVER = "86400"  # seconds; deadlines are the client's


class Worker(msgspec.Struct, frozen=True):
    """The fields of the router's GET /workers that we read."""

    id: str
    url: str
    is_healthy: bool = False


class _Workers(msgspec.Struct):
    workers: list[Worker]


class Router:
    """Supervises smg and mirrors the registry's serving engines into it."""

    def __init__(
        self,
        registry: EngineRegistry,
        http: Http,
        *,
        log_dir: Path,
        name: str = "router",
        policy: str = "consistent_hashing",
        network: Network = LOCAL,
        port: int | None = None,
        start_timeout: float = 60.0,
        max_restarts: int = 10,
        restart_window: float = 3600.0,
        extra: Sequence[str] = (),
        keys: EngineKeys | None = None,
    ) -> None:
        """``port``: None for a free one, on loopback unless there are certificates, which name the node's address: all
        clients of the run are on this machine. ``max_restarts``: in any ``restart_window`` seconds. ``extra``:
        arguments of smg, which override ours. ``keys``: None on loopback only.
        """
        host = LOOPBACK if port is None and network.tls is None else network.entrance()
        require_keys(host, keys)
        self._keys = keys
        self._registry = registry
        self._http = http
        self._log_dir = log_dir
        self._name = name
        self._policy = policy
        self._host = host
        self._port = port
        self._network = network
        self._start_timeout = start_timeout
        self._budget = RestartBudget(max_restarts, restart_window)
        self._extra = tuple(extra)
        self._process: ChildProcess | None = None
        self._starts = 0
        self.url = ""  # set by start(), the same after restarts
        self.metrics_url = ""  # differs after every start

    async def start(self) -> None:
        """Start smg and register the engines that serve. Raises EngineStartError; ConfigurationError (port taken)."""
        log_path = self._log_dir / f"{self._name}.{self._starts}.log"
        self._starts += 1
        # The ports stay held until smg listens: Linux lets it, since it binds with SO_REUSEADDR like us.
        with HeldPort(self._host, self._port, ports=self._network.ports) as port, HeldPort(LOOPBACK) as metrics_port:
            self._port = port.number
            self.url = self._network.url(self._host, port.number)
            self.metrics_url = f"http://{LOOPBACK}:{metrics_port.number}/metrics"
            extra = [*tls_flags(self._network.tls), *self._extra]
            command = router_command(self._host, port.number, metrics_port.number, self._policy, extra)
            environment = {} if self._keys is None else self._keys.environment()
            self._process = ChildProcess(self._name, command, log_path=log_path, environment=environment)
            self._process.start()
            try:
                async with asyncio.timeout(self._start_timeout):
                    await self._until_up(self._process)
            except TimeoutError:
                message = f"router did not come up within {self._start_timeout:g} s:\n{self._process.tail()}"
                await self.stop()
                raise EngineStartError(message) from None
        serving = self._registry.in_state(EngineState.SERVING)
        await gathered(*(self._register_again(record, record.url) for record in serving if record.url is not None))
        self._registry.router_up = True
        self._registry.notify()

    async def _register_again(self, record: EngineRecord, url: str) -> None:
        try:
            await self.add(url)
        except EngineError as error:  # the engine died, too, and is about to be fenced: not fatal
            log.warning("engine was not registered with the new router", url=url, error=str(error))
        else:
            if record.state is not EngineState.SERVING or record.url != url:  # fenced meanwhile
                await self.remove(url)

    async def supervise(self) -> None:
        """Restart smg whenever it dies. Raises EngineError if it dies too often."""
        while True:
            assert self._process is not None
            status = await self._process.wait()
            self._registry.router_up = False
            self._registry.notify()
            tail = self._process.tail()
            if not self._budget.take():
                raise EngineError(f"router was restarted {self._budget}, and now it died with status {status}:\n{tail}")
            log.warning("router died; restarting it", status=status, log=str(self._process.log_path))
            try:
                await self.start()
            except EngineStartError as error:  # as if it had died again
                log.warning("router did not start", error=str(error))

    async def stop(self) -> None:
        """End smg at once; it has no state to save."""
        self._registry.router_up = False
        self._registry.notify()
        if self._process is not None:
            await self._process.stop(grace_seconds=0)

    async def pid(self) -> int:
        """PID of the router process."""
        assert self._process is not None
        return self._process.pid

    async def add(self, url: str, timeout: float = 30.0) -> None:
        """Register an engine and wait until requests can reach it, also through a restart of the router. No-op if it
        is registered. Raises EngineError after ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while not await self._is_routable(url):  # noqa: ASYNC110  (smg has no event for it)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise EngineError(f"router did not accept {url} within {timeout:g} s") from None

    async def remove(self, url: str) -> None:
        """Send no new requests to this engine. No-op if it is not registered."""
        for worker in await self.workers():
            if worker.url == url:
                await self._call("DELETE", f"/workers/{worker.id}", None, accept=(200, 202, 404))

    async def workers(self) -> list[Worker]:
        return decode_json(await self._call("GET", "/workers", None, accept=(200,)), _Workers, "router").workers

    async def _is_routable(self, url: str) -> bool:
        """Return whether requests reach an engine; if not, register it: smg does so in the background, and forgets it
        when it restarts.
        """
        try:
            known = [worker for worker in await self.workers() if worker.url == url]
            if not known:
                body = {"url": url, "worker_type": "regular"}
                if self._keys is not None:
                    body["api_key"] = self._keys.api.reveal()
                await self._call("POST", "/workers", body, accept=(200, 202, 409))  # 409: asked already
        except EngineError as error:
            log.debug("router does not answer yet", error=str(error))
            return False
        return any(worker.is_healthy for worker in known)

    async def _until_up(self, process: ChildProcess) -> None:
        while process.returncode is None:
            try:
                await self._call("GET", "/health", None, accept=(200,))
                return
            except EngineError:
                await asyncio.sleep(_POLL_SECONDS)
        raise EngineStartError(f"router ended with status {process.returncode}:\n{process.tail()}")

    async def _call(self, method: str, path: str, body: Mapping[str, str] | None, *, accept: Sequence[int]) -> bytes:
        try:
            async with self._http.session.request(
                method, self.url + path, json=body, headers=self._http.as_admin, timeout=_CALL_TIMEOUT
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"router: {method} {path}: {error!r}") from error
        if response.status not in accept:
            text = answer.decode(errors="replace")[:ERROR_TEXT]
            raise EngineError(f"router: {method} {path}: expected {accept}, found {response.status}: {text}")
        return answer


class Routing:
    """Moves engines into and out of the router, together with their state in the registry."""

    def __init__(self, registry: EngineRegistry, router: Router) -> None:
        self._registry = registry
        self._router = router

    async def admit(self, record: EngineRecord) -> None:
        """Make a joining engine serve. Raises EngineError if the router does not accept it."""
        incarnation, url = record.incarnation, record.url
        assert url is not None, "it is up"
        await self._router.add(url)
        if record.incarnation == incarnation and record.state is EngineState.JOINING:
            record.state = EngineState.SERVING
            self._registry.notify()
        elif self._registry.answering_at(url) is None:  # lost or drained meanwhile, perhaps before the router knew it
            await self.remove(url)

    async def fence(self, record: EngineRecord, reason: str) -> None:
        """Take an engine out if it is up. The supervisor then ends its process, with its requests, and restarts it."""
        if record.state in (EngineState.SERVING, EngineState.JOINING):
            await self.take_out(record, reason)

    async def take_out(self, record: EngineRecord, reason: str) -> None:
        """Void everything known about an engine and remove it from the router. No-op if it is out already."""
        if record.state in (EngineState.FENCED, EngineState.DRAINING):
            return
        url = record.url
        record.reason = reason
        record.forget(EngineState.FENCED)
        self._registry.notify()
        log.warning("engine fenced", engine=record.engine_id, reason=reason)
        if url is not None:
            await self.remove(url)

    async def remove(self, url: str) -> None:
        """Remove a server from the router; never raises."""
        try:
            await self._router.remove(url)
        except EngineError as error:  # a router that is down gets the list of serving engines when it is back
            log.warning("router could not remove engine", url=url, error=str(error))


def router_command(host: str, port: int, metrics_port: int, policy: str, extra: Sequence[str]) -> list[str]:
    """Interpreter arguments that start smg. Later ones win, and the user's come last."""
    return [
        "-m",
        "miles_async.engines.router_launcher",
        f"--host={host}",
        f"--port={port}",
        f"--prometheus-host={LOOPBACK}",
        f"--prometheus-port={metrics_port}",
        f"--policy={policy}",
        "--disable-retries",
        "--disable-circuit-breaker",
        "--disable-health-check",
        "--disable-worker-overload-protection",
        f"--worker-wedge-secs={_FOREVER}",
        f"--worker-stall-secs={_FOREVER}",
        "--max-concurrent-requests=0",  # unlimited: concurrency is bounded by the dispatcher
        f"--request-timeout-secs={_FOREVER}",
        "--disable-tokenizer-autoload",
        "--worker-startup-check-interval=1",
        "--log-level=warn",
        *extra,
    ]


def tls_flags(tls: Tls | None) -> list[str]:
    """Flags of smg for TLS at its door and towards engines."""
    if tls is None:
        return []
    authorities = [] if tls.ca is None else [f"--ca-cert-paths={tls.ca}"]
    return [f"--tls-cert-path={tls.certificate}", f"--tls-key-path={tls.key}", *authorities]
