"""Servers under virtual time that hold exactly what they were sent, behind the real fleet and supervisor.

Their process groups work as real ones do: a broadcast is through when every member takes part, a member that dies
breaks it for all, and members that wait for one that hangs give up after a while, or never.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
import msgspec
from safetensors.numpy import load_file

from miles_async.engines.fleet import Fleet
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.sglang import STREAM
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError
from miles_async.simulation.network import Network, Response, SimulatedHttp
from miles_async.types import JsonObject, StagedWeights
from miles_async.weights.staging_options import KEPT_VERSIONS
from tests.fakes.fake_fleet import FakeRouter
from tests.fakes.fake_sides import CANARY_LOGPROBS, Answer, FakeTrainer, InProcess

OK = Response(msgspec.json.encode({"success": True}))


class Group:
    """One process group with one sender."""

    def __init__(self, world_size: int) -> None:
        self.broken = asyncio.Event()
        self._world_size = world_size
        self._met: dict[object, tuple[set[str], asyncio.Event]] = {}

    async def meet(self, who: str, occasion: object, seconds: float | None) -> None:
        """Until all are there. Raises ConnectionError if one of them is gone, or stays away for so long."""
        present, complete = self._met.setdefault(occasion, (set(), asyncio.Event()))
        present.add(who)
        if len(present) == self._world_size:
            complete.set()
        waits = [asyncio.ensure_future(complete.wait()), asyncio.ensure_future(self.broken.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not complete.is_set():
            raise ConnectionError("connection closed by peer" if self.broken.is_set() else "timed out waiting")


class WeightServer:
    """A host of the network, from its start to its death."""

    def __init__(self, world: World, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.held: dict[str, object] = {}  # tensor → what it holds of it
        self.version = "default"
        self.dead = asyncio.Event()
        self.calls: list[str] = []
        self._world = world
        self._updating = False
        self._paused = False
        self._groups: dict[str, Group] = {}

    def die(self) -> None:
        if not self.dead.is_set():
            self.dead.set()
            self._world.network.hosts.pop(self.url, None)
            for group in self._groups.values():
                group.broken.set()

    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        self.calls.append(path)
        await asyncio.sleep(self._world.seconds_per_call.get(self.name, 0.0))
        if self._world.hangs(self.name, path):
            await self.dead.wait()
        fields = msgspec.json.decode(body) if body else {}
        try:
            response = self._respond(path, fields) or await self._receive(path, fields)
        except ConnectionError as error:
            response = Response(str(error).encode(), status=400)
        if self.dead.is_set():
            raise aiohttp.ServerDisconnectedError()
        return response

    def _respond(self, path: str, body: JsonObject) -> Response | None:
        match path:
            case "/model_info":
                return Response(msgspec.json.encode({"weight_version": self.version}))
            case "/generate":
                scores = [(None, 0, None), *((score, 0, None) for score in CANARY_LOGPROBS)]
                meta = {"weight_version": self.version, "input_token_logprobs": scores}
                return Response(msgspec.json.encode({"meta_info": meta}))
            case "/begin_weight_update" if self._updating:
                return Response(b"a session is open already", status=400)
            case "/begin_weight_update" | "/end_weight_update":
                self._updating = path.startswith("/begin")
            case "/update_weights_from_disk":
                self._load(Path(body["model_path"]))
                self.version = body["weight_version"]
            case "/destroy_weights_update_group":
                self._groups.pop(body["group_name"], None)
            case "/init_weights_update_group" | "/update_weights_from_distributed":
                return None
        return OK

    async def _receive(self, path: str, body: JsonObject) -> Response:
        name = body["group_name"]
        if path == "/init_weights_update_group":
            group = self._world.groups[name]
            await group.meet(self.name, "join", self._world.patience)
            self._groups[name] = group
            return OK
        streams = body["load_format"] == STREAM
        if name not in self._groups or self._updating is streams:
            return Response(b"no such group, or no session, or one for a stream", status=400)
        version = int(body["weight_version"])
        for tensor in self._world.contents(version) if streams else body["names"]:
            try:
                await self._groups[name].meet(self.name, (tensor, version), self._world.patience)
            except ConnectionError:
                if streams:  # it leaves
                    self._groups.pop(name).broken.set()
                raise
            self.held[tensor] = version
        self.version = body["weight_version"]
        return OK

    def _load(self, directory: Path) -> None:
        for file in directory.glob("*.safetensors"):
            self.held |= {name: tensor.tobytes() for name, tensor in load_file(file).items()}


class _Server:
    """A ServerHandle."""

    def __init__(self, world: World, index: int, incarnation: int) -> None:
        self._world = world
        self._name, self._url = f"engine-{index}", f"sim://engine-{index}.{incarnation}"
        self._server: WeightServer | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> str:
        await asyncio.sleep(self._world.start_seconds)
        server = self._server = WeightServer(self._world, self._name, self._url)
        self._world.servers[self._name] = self._world.network.hosts[self._url] = server
        return self._url

    async def wait_exit(self) -> str:
        assert self._server is not None
        await self._server.dead.wait()
        return "died"

    async def on_host(self, function: Callable[..., object], room: int, *arguments: object) -> object:
        await asyncio.sleep(self._world.seconds_per_call.get(self._name, 0.0))
        if self._server is None or self._server.dead.is_set():
            raise EngineError("its actor is gone")
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory()
        return function(Path(self._directory.name), *arguments)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.die()
        if self._directory is not None:
            self._directory.cleanup()


class _CheckedRegistry(EngineRegistry):
    """Asserts, whenever anything changes, that engines hold what they are said to serve."""

    def __init__(self, check: Callable[[EngineRegistry], None]) -> None:
        self._check = check
        super().__init__()

    def notify(self) -> None:
        super().notify()
        self._check(self)


class World:
    """Engines, their fleet and the groups that they are in."""

    def __init__(
        self,
        engines: int,
        contents: Callable[[int], Mapping[str, object]],
        *,
        step_timeout: float,
        bucketwise: bool = False,
    ) -> None:
        """``contents``: of a version, by tensor. To be made on a loop of virtual time."""
        self.network = Network()
        self.servers: dict[str, WeightServer] = {}
        self.groups: dict[str, Group] = {}
        self.hanging: dict[str, str] = {}  # engine → path that it does not answer
        self.seconds_per_call: dict[str, float] = {}
        self.start_seconds = 30.0
        self.patience: float | None = 0.8 * step_timeout  # of members that wait for others; None: without end
        self.contents = contents
        self.registry = _CheckedRegistry(self._check)
        router = FakeRouter(self.registry)
        http = SimulatedHttp(self.network)
        group = EngineGroup(
            engines=engines,
            streams=not bucketwise,
            launch=lambda index, incarnation: _Server(self, index, incarnation),
        )
        self.supervisor = EngineSupervisor(self.registry, router, SGLangServer(http), [group], max_restarts=10**6)
        self.fleet = Fleet(
            self.registry, self.supervisor, SGLangServer(http), Traffic(lambda: 0.0), step_timeout=step_timeout
        )
        self._supervision: asyncio.Task[None] | None = None
        self._router = router

    async def __aenter__(self) -> World:
        await self._router.start()
        await self.supervisor.start()
        self._supervision = asyncio.ensure_future(self.supervisor.supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._supervision is not None
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        await self.supervisor.stop()

    def hangs(self, engine: str, path: str) -> bool:
        return self.hanging.get(engine) == path

    def serving(self) -> set[str]:
        return {record.engine_id for record in self.registry.in_state(EngineState.SERVING) if record.verified}

    def _check(self, registry: EngineRegistry) -> None:
        for record in registry.in_state(EngineState.SERVING):
            if record.verified and record.url in self.network.hosts:
                assert record.version is not None
                held = self.servers[record.engine_id].held
                assert held == self.contents(record.version), f"{record.engine_id} does not hold {record.version}"


class BroadcastingTrainer(FakeTrainer):
    """The sending ranks of ``distributed``. Each has a thread for deliveries and another for repairs."""

    def __init__(self, *, buckets: int = 8, patience: float) -> None:
        super().__init__([], buckets=buckets)
        self.world: World
        self._patience = patience
        self._staged: dict[int, None] = {}
        self._kept: set[int] = set()
        self._threads = {repair: asyncio.Lock() for repair in (False, True)}

    def contents(self, version: int) -> Mapping[str, int]:
        return {f"t{index}": version for index in range(self.buckets)}

    async def stage_weights(self, version: int) -> StagedWeights:
        self._staged[version] = None
        for old in list(self._staged)[:-KEPT_VERSIONS]:
            if old not in self._kept:
                del self._staged[old]
        return await super().stage_weights(version)

    def sender(self, index: int, *, repair: bool = False) -> InProcess:
        return _InThread(self, self._threads[repair])

    # What each sending rank does.
    async def pin(self, version: int) -> None:
        self._kept.add(version)

    async def unpin(self, version: int) -> None:
        self._kept.remove(version)

    async def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        self.world.groups[group_name] = Group(world_size)
        return "127.0.0.1", 1

    async def join_group(self, group_name: str) -> None:
        await self._meet(group_name, "join")

    async def send(self, group_name: str, version: int, announce: bool) -> str | None:
        assert version in self._staged
        problems = [await self._meet(group_name, (tensor, version)) for tensor in self.contents(version)]
        return next(filter(None, problems), None)

    async def leave_group(self, group_name: str) -> None:
        self.world.groups.pop(group_name).broken.set()

    async def _meet(self, name: str, occasion: object) -> str | None:
        try:
            await self.world.groups[name].meet("sender", occasion, self._patience)
        except ConnectionError as error:
            self.world.groups[name].broken.set()
            return f"the process group broke: {error}"
        return None


class _InThread(InProcess):
    """One call at a time."""

    def __init__(self, half: object, thread: asyncio.Lock) -> None:
        super().__init__(half)
        self._thread = thread

    async def call(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        async with self._thread:
            return await super().call(method, *arguments)
