"""Fleet with in-process engines: the life of an engine, and a publication as the publisher drives it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from aiohttp import ClientError, ClientResponse
from structlog.testing import capture_logs

from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.held_report import REPORT_ACTION
from miles_async.engines.stack import FrozenEngines
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, EngineTimeoutError, ProcessLostError
from miles_async.seams import InferenceServer, per_engine
from miles_async.types import GenerateRequest, HeldPart, HeldWeights, Incarnation, TensorMeta, TensorShare
from miles_async.weights.verify import read_held_weights
from tests.fakes.clients import client_of, registry_of, serving
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_fleet import FakeRouter, FakeServer
from tests.json_dict import JsonDict

E0, E1 = Incarnation("engine-0", 0), Incarnation("engine-1", 0)
BUCKET = (TensorMeta("model.norm.weight", "float32", (64,)),)


class Setup:
    """A fleet whose servers are fakes; ``servers[i][n]`` is the n-th start of engine i."""

    def __init__(
        self,
        num_engines: int,
        *,
        make: Callable[[int, int], FakeServer] | None = None,
        max_restarts: int = 1,
        restart_window: float = 3600.0,
        needed: bool = True,
    ) -> None:
        self.registry = EngineRegistry()
        self.router = FakeRouter(self.registry)
        self.http = Http()
        self.traffic = Traffic()
        self.servers: list[list[FakeServer]] = [[] for _ in range(num_engines)]
        self._make = make or (lambda index, incarnation: FakeServer(FakeEngine()))
        self.supervisor = EngineSupervisor(
            self.registry,
            self.router,  # type: ignore[arg-type]
            SGLangServer(self.http),
            [EngineGroup(engines=num_engines, launch=self._launch)],
            max_restarts=max_restarts,
            restart_window=restart_window,
            needed=needed,
        )
        Late.setup = self
        self.supervision: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fleet = Fleet(self.registry, self.supervisor, SGLangServer(self.http), self.traffic)

    def _launch(self, index: int, incarnation: int) -> FakeServer:
        server = self._make(index, incarnation)
        self.servers[index].append(server)
        return server

    async def publish(self, engines: tuple[Incarnation, ...], version: int, mode: str = "retract") -> None:
        """As weights.publisher does, everything going well."""
        fleet = self.fleet
        for errors in (
            await fleet.call(engines, InferenceServer.join_group, 1, "g", "127.0.0.1", 1, 1 + len(engines), "gloo"),
            await fleet.call(engines, InferenceServer.pause, mode),
            await fleet.call(engines, InferenceServer.begin_update),
            await fleet.call(engines, InferenceServer.receive_bucket, "g", BUCKET, version),
            await fleet.call(engines, InferenceServer.end_update),
            await fleet.call(engines, InferenceServer.resume),
        ):
            assert errors == dict.fromkeys(engines)
        assert await fleet.admit(engines, version) == dict.fromkeys(engines)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(50):
            await self.registry.wait_until(condition)

    def supervise(self) -> None:
        self.supervision = asyncio.ensure_future(self.supervisor.supervise())

    def request(self, engine: FakeEngine, tokens: int = 9) -> AbstractAsyncContextManager[ClientResponse]:
        """A request to ``engine``, which answers it once all of these are sampled."""
        body = {"rid": "r", "input_ids": [5], "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
        return self.http.session.post(f"{engine.url}/generate", json=body)


@asynccontextmanager
async def made(num_engines: int, **options: object) -> AsyncIterator[Setup]:
    """Nothing is started but the router."""
    setup = Setup(num_engines, **options)  # type: ignore[arg-type]
    await setup.router.start()
    try:
        yield setup
    finally:
        setup.supervision.cancel()
        await asyncio.gather(setup.supervision, return_exceptions=True)
        await setup.supervisor.stop()
        await setup.http.close()


@asynccontextmanager
async def started(num_engines: int, **options: object) -> AsyncIterator[Setup]:
    async with made(num_engines, **options) as setup:
        await setup.supervisor.start()
        setup.supervise()
        yield setup


async def test_engines_that_came_up_are_joining_and_not_routable() -> None:
    async with started(2) as setup:
        members = await setup.fleet.members()
        assert members.joining == (E0, E1)
        assert members.serving == members.starting == ()
        assert members.ranks == {"engine-0": 1, "engine-1": 1}
        assert setup.router.registered == []
        assert not setup.registry.may_dispatch()


async def test_a_probe_notes_how_many_tokens_an_engine_may_have_in_flight() -> None:  # covers: C1
    async with started(2) as setup:
        info = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}
        setup.servers[1][0].engine.server_info = info
        found = await setup.fleet.call((E0, E1), InferenceServer.probe, brief=True)
        assert found == {E0: 1, E1: 4}
        assert [record.tokens_in_flight for record in setup.registry.engines.values()] == [1, 4]


async def test_a_publication_makes_engines_serve_under_its_version() -> None:  # covers: C8
    async with started(2) as setup:
        engines = (E0, E1)
        await setup.publish(engines, 0)
        assert (await setup.fleet.members()).serving == engines
        assert len(setup.router.registered) == 2
        assert setup.registry.may_dispatch()
        await setup.publish(engines, 1)
        assert setup.registry.version == 1
        assert len(setup.router.registered) == 2


async def test_requests_wait_from_pause_until_the_trial() -> None:  # covers: C8
    async with started(1) as setup:
        one = (E0,)
        await setup.publish(one, 0)
        fleet, may_dispatch = setup.fleet, setup.registry.may_dispatch
        await fleet.call(one, InferenceServer.pause, "retract")
        assert not may_dispatch()
        await fleet.call(one, InferenceServer.begin_update)
        await fleet.call(one, InferenceServer.receive_bucket, "g", BUCKET, 1)
        await fleet.call(one, InferenceServer.end_update)
        await fleet.call(one, InferenceServer.resume)
        assert not may_dispatch()  # new weights, not compared
        await fleet.begin_trial(one, 1)
        assert may_dispatch()
        assert setup.registry.version == 1, "what new requests are sent under"
        [record] = setup.registry.engines.values()
        assert not record.verified, "answers wait"
        score = (await fleet.call(one, InferenceServer.score, [5, 6, 7]))[E0]
        assert not isinstance(score, Exception)
        assert (score.weight_version, score.logprobs.tolist()) == ("1", [-1.0, -1.0])
        await fleet.admit(one, 1)
        assert may_dispatch()
        assert record.verified


async def test_a_trial_is_for_engines_that_serve_and_ends_with_the_next_update() -> None:  # covers: C8
    async with started(2) as setup:
        await setup.publish((E0,), 0)
        await setup.fleet.call((E0, E1), InferenceServer.begin_update)
        await setup.fleet.begin_trial((E0, E1), 1)
        serving, joining = setup.registry.engines.values()
        assert (serving.on_trial, joining.on_trial) == (True, False)
        await setup.fleet.call((E0,), InferenceServer.begin_update)
        assert not setup.registry.may_dispatch()
        await setup.fleet.begin_trial((E0,), 2)
        await setup.servers[0][0].crash()
        await setup.until(lambda: serving.state is EngineState.JOINING)
        assert not serving.on_trial


async def test_a_pause_without_update_ends_with_resume() -> None:
    async with started(1) as setup:
        await setup.publish((E0,), 0)
        await setup.fleet.call((E0,), InferenceServer.pause, "in_place")
        await setup.fleet.call((E0,), InferenceServer.resume)
        assert setup.registry.may_dispatch()


async def test_an_engine_takes_weights_in_place_while_it_keeps_a_request() -> None:
    """It could not flush its cache then."""
    # covers: M11
    async with started(1) as setup:
        await setup.publish((E0,), 0)
        engine = setup.servers[0][0].engine
        engine.token_seconds = 0.3

        async def request() -> None:
            async with setup.request(engine) as response:
                await response.read()

        under_way = asyncio.create_task(request())
        await asyncio.sleep(0.05)
        await setup.publish((E0,), 1, "in_place")
        assert not under_way.done()
        under_way.cancel()


async def test_repairing_a_joining_engine_does_not_stop_the_serving_one() -> None:
    async with started(2) as setup:
        await setup.publish((E0,), 5)
        await setup.fleet.call((E1,), InferenceServer.pause, "abort")
        assert setup.registry.may_dispatch()
        await setup.fleet.call((E1,), InferenceServer.resume)
        await setup.publish((E1,), 5)
        assert (await setup.fleet.members()).serving == (E0, E1)


async def test_abort_pause_ends_requests_before_it_pauses() -> None:
    """SGLang's own abort-pause would wait for a whole second."""
    async with started(1) as setup:
        await setup.publish((E0,), 0)
        engine = setup.servers[0][0].engine
        engine.token_seconds = 0.3
        engine.calls.clear()

        async def request() -> None:
            with setup.traffic.request("r"):
                async with setup.request(engine) as response:
                    await response.read()

        async with asyncio.TaskGroup() as scope:
            scope.create_task(request())
            await asyncio.sleep(0.05)
            await setup.fleet.call((E0,), InferenceServer.pause, "abort")
            assert setup.traffic.in_flight == 0
        assert engine.calls[0] == "/abort_request"
        assert engine.calls[-1] == "/pause_generation"


async def test_no_abort_waits_for_the_requests_of_an_engine_that_is_drained() -> None:
    async with started(2) as setup:
        await setup.publish((E0, E1), 0)
        engine = setup.servers[1][0].engine
        engine.token_seconds = 0.05
        with setup.traffic.request("r"):
            async with setup.request(engine):
                await setup.supervisor.scale("engine", 1)
                await setup.fleet.call((E0,), InferenceServer.pause, "abort")
        assert "/abort_request" not in setup.servers[0][0].engine.calls


async def frozen(setup: Setup) -> None:
    """Admit engines as ``FrozenEngines`` does."""
    engines = FrozenEngines.__new__(FrozenEngines)
    engines.registry, engines.supervisor = setup.registry, setup.supervisor
    await engines._admit()


async def test_a_frozen_engine_may_be_lost_while_another_is_admitted() -> None:
    async with started(2) as setup:
        real_add = setup.router.add

        async def add(url: str, timeout: float = 0.0) -> None:
            if url == setup.servers[0][0].engine.url:
                await setup.servers[1][0].crash()
                await setup.until(lambda: setup.registry.engines["engine-1"].url is None)
            await real_add(url)

        setup.router.add = add  # type: ignore[method-assign]
        admitting = asyncio.ensure_future(frozen(setup))
        await setup.until(lambda: len(setup.registry.in_state(EngineState.SERVING)) == 2)
        admitting.cancel()


async def test_a_frozen_engine_that_is_lost_in_its_admission_is_fenced_once() -> None:
    async with started(1) as setup:
        record, real_add = setup.registry.engines["engine-0"], setup.router.add

        async def add(url: str, timeout: float = 0.0) -> None:
            if record.incarnation == 0:
                await setup.servers[0][0].crash()
                await setup.until(lambda: record.incarnation == 1 and record.state is EngineState.JOINING)
                raise EngineError("router did not accept it")
            await real_add(url)

        setup.router.add = add  # type: ignore[method-assign]
        admitting = asyncio.ensure_future(frozen(setup))
        await setup.until(lambda: record.state is EngineState.SERVING)
        assert record.restarts == 1
        admitting.cancel()


async def test_engines_load_files_each_from_its_own_directory(tmp_path: Path) -> None:  # covers: C8, P4
    async with started(2) as setup:
        await setup.publish((E0, E1), 0)
        for index in range(2):
            (tmp_path / str(index)).mkdir()
            (tmp_path / str(index) / f"bucket-{index}.safetensors").touch()
        await setup.fleet.call((E0, E1), InferenceServer.pause, "in_place")
        directories = per_engine({engine: str(tmp_path / str(i)) for i, engine in enumerate((E0, E1))})
        errors = await setup.fleet.call((E0, E1), InferenceServer.load_files, directories, 1)
        assert errors == {E0: None, E1: None}
        assert [servers[0].engine.loaded for servers in setup.servers] == [
            ["bucket-0.safetensors"],
            ["bucket-1.safetensors"],
        ]
        await setup.fleet.call((E0, E1), InferenceServer.resume)
        assert not setup.registry.may_dispatch()  # new weights, not verified
        await setup.fleet.admit((E0, E1), 1)
        assert setup.registry.may_dispatch()


async def test_a_directory_that_an_engine_does_not_see_is_its_error() -> None:
    async with started(1) as setup:
        errors = await setup.fleet.call((E0,), InferenceServer.load_files, "/nowhere", 1)
        assert "/update_weights_from_disk: expected 200, found 400" in str(errors[E0])


async def test_functions_run_on_the_hosts_of_engines() -> None:
    def work(directory: Path, argument: int) -> str:
        return f"{directory.name} {argument}"

    async with started(2, max_restarts=0) as setup:
        for index, servers in enumerate(setup.servers):
            servers[0].host_directory = Path(f"/host-{index}")
        both = (E0, E1)
        assert await setup.fleet.on_host(both, work, 7) == {E0: "host-0 7", E1: "host-1 7"}
        await setup.servers[0][0].crash()
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.GONE)
        results = await setup.fleet.on_host(both, work, 7)
        assert isinstance(results[E0], EngineError)
        assert results[E1] == "host-1 7"


async def test_weights_that_an_engine_holds_are_reported_over_all_its_ranks() -> None:
    # covers: C8
    parts = [HeldPart(offset, (2, 4), (4, 1), "float32", digest) for offset, digest in ((0, "aa"), (8, "bb"))]
    norm = HeldPart(0, (4,), (1,), "float32", "cc")
    async with started(1) as setup:
        setup.servers[0][0].engine.held = [
            HeldWeights(parts={"w": (part,), "norm": (norm,)}, other_form=("q",), unfilled={f"bias-{rank}": 3})
            for rank, part in enumerate(parts)
        ]
        held = (await read_held_weights(setup.fleet, (E0,), TensorShare()))[E0]
    assert isinstance(held, HeldWeights)
    assert held.parts == {"w": tuple(parts), "norm": (norm, norm)}
    assert held.other_form == ("q",)
    assert dict(held.unfilled) == {"bias-0": 3, "bias-1": 3}


def holds(digest: str) -> HeldWeights:
    return HeldWeights(parts={"w": (HeldPart(0, (2,), (1,), "float32", digest),)})


async def test_of_reports_that_are_the_same_one_is_read() -> None:
    # covers: C8
    engines = [Incarnation(f"engine-{index}", 0) for index in range(5)]
    async with started(5) as setup:
        fakes = [servers[0].engine for servers in setup.servers]
        for fake, digest in zip(fakes, ("aa", "aa", "bb", "aa", "bb"), strict=True):
            fake.held = [holds(digest)]
        found = await read_held_weights(setup.fleet, engines, TensorShare())
    assert [found[engine] for engine in engines] == [holds(d) for d in ("aa", "aa", "bb", "aa", "bb")]
    assert len({id(held) for held in found.values()}) == 2
    assert [fake.checks.count(REPORT_ACTION) for fake in fakes] == [1, 0, 1, 0, 0]


async def test_a_report_that_an_engine_cannot_tell_any_more_is_read_from_the_next_one() -> None:
    # covers: C8
    async with started(2) as setup:
        first, second = (servers[0].engine for servers in setup.servers)
        first.held = second.held = [holds("aa")]
        first.reports_otherwise = [holds("bb")]
        found = await read_held_weights(setup.fleet, (E0, E1), TensorShare())
    assert "expected the report of its weights with fingerprint" in str(found[E0])
    assert found[E1] == holds("aa")


@pytest.mark.parametrize(("broken", "seconds"), [(False, 0.6), (True, 0.2)])
async def test_a_stream_has_its_deadline_when_the_senders_are_through(broken: bool, seconds: float) -> None:
    # covers: C8, C10
    async with started(2) as setup:
        fleet = Fleet(setup.registry, setup.supervisor, SGLangServer(setup.http), setup.traffic, step_timeout=0.6)
        publication = 6 * 0.6
        await fleet.call((E0, E1), InferenceServer.join_group, 1, "g", "127.0.0.1", 1, 3, "gloo")
        setup.servers[1][0].engine.silent.add("/update_weights_from_distributed")
        receiving = asyncio.ensure_future(fleet.call((E0, E1), InferenceServer.receive_stream, ["g"], 1))
        await asyncio.sleep(0.8)
        assert not receiving.done(), "the senders are not through"
        before = asyncio.get_running_loop().time()
        await fleet.stream_sent((E0, E1), broken=broken)
        errors = await receiving
        assert seconds <= asyncio.get_running_loop().time() - before < publication - 0.8, "its own deadline"
        assert errors[E0] is None
        assert isinstance(errors[E1], EngineTimeoutError)
        assert f"no answer within {seconds:g} s after the senders had finished" in str(errors[E1])
        await fleet.stream_sent((E0, E1), broken=False)  # nobody waits any more


async def test_senders_that_are_never_through_cost_all_of_a_publication_at_most() -> None:
    # covers: C10
    async with started(1) as setup:
        fleet = Fleet(setup.registry, setup.supervisor, SGLangServer(setup.http), setup.traffic, step_timeout=0.02)
        setup.servers[0][0].engine.silent.add("/update_weights_from_distributed")
        errors = await fleet.call((E0,), InferenceServer.receive_stream, ["g"], 1)
        assert "no answer within 0.12 s" in str(errors[E0])


async def test_calls_to_many_engines_begin_a_few_per_turn_of_the_loop() -> None:
    """Each takes a fifth of a millisecond, and requests wait for the loop meanwhile."""
    # covers: C10
    turn = 0
    begun: Counter[int] = Counter()

    class NoHttp(Http):
        @property
        def session(self) -> NoReturn:
            begun[turn] += 1
            raise ClientError

    registry = registry_of(*(serving(f"http://{index}", f"engine-{index}") for index in range(100)))
    fleet = Fleet(registry, None, SGLangServer(NoHttp()), Traffic())  # type: ignore[arg-type]
    engines = [record.current for record in registry.engines.values()]
    flushing = asyncio.ensure_future(fleet.call(engines, InferenceServer.flush_cache))
    while not flushing.done():
        turn += 1
        await asyncio.sleep(0)
    assert all(isinstance(answer, EngineError) for answer in (await flushing).values())
    assert sum(begun.values()) == 100
    assert max(begun.values()) <= 16


async def test_a_failing_engine_is_an_entry_not_an_exception() -> None:
    async with started(2) as setup:
        errors = await setup.fleet.call((E0, E1), InferenceServer.receive_bucket, "g", BUCKET, 1)
        assert all("begin_weight_update" in str(error) for error in errors.values())
        await setup.servers[0][0].engine.die()
        errors = await setup.fleet.call((E0, E1), InferenceServer.begin_update)
        assert isinstance(errors[E0], EngineError)
        assert errors[E1] is None


async def test_a_crashed_engine_leaves_the_router_and_comes_back_joining() -> None:
    async with started(2) as setup:
        await setup.publish((E0, E1), 0)
        url = setup.servers[0][0].engine.url
        await setup.servers[0][0].crash()
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert ("remove", url) in setup.router.events
        assert len(setup.servers[0]) == 2
        members = await setup.fleet.members()
        assert (members.serving, members.joining) == ((E1,), (Incarnation("engine-0", 1),))
        assert setup.registry.may_dispatch()  # the other one goes on


async def test_a_fenced_engine_is_out_at_once_and_restarted() -> None:  # covers: C8
    async with started(1) as setup:
        await setup.publish((E0,), 0)
        await setup.fleet.fence((E0,), "canary disagrees")
        assert setup.router.registered == []
        assert not setup.registry.may_dispatch()
        async with asyncio.timeout(50):
            await setup.supervisor.wait_for_joining()
        assert setup.servers[0][0].stopped
        assert setup.registry.engines["engine-0"].reason == "canary disagrees"


async def test_supervision_ends_when_cancelled_in_the_moment_of_a_fence() -> None:
    async with started(1) as setup:
        await asyncio.sleep(0.05)
        await setup.fleet.fence((E0,), "test")
        await asyncio.sleep(0)  # the wait for the fence has its result, who waits for it has not seen it
        setup.supervision.cancel()
        done, _ = await asyncio.wait([setup.supervision], timeout=2)
        assert done


async def test_an_engine_that_claims_another_version_is_not_admitted() -> None:
    async with started(1) as setup:
        errors = await setup.fleet.admit((E0,), 7)
        assert setup.registry.in_state(EngineState.SERVING) == ()
        assert "expected weight version 7, found 'default'" in str(errors[E0])


async def test_an_engine_that_dies_while_it_is_admitted_does_not_serve() -> None:
    async with started(1, max_restarts=0) as setup:
        real_add = setup.router.add

        async def add_then_die(url: str, timeout: float = 0.0) -> None:
            await real_add(url)
            await setup.servers[0][0].crash()
            await setup.until(lambda: setup.registry.engines["engine-0"].incarnation > 0)

        setup.router.add = add_then_die  # type: ignore[method-assign]
        setup.servers[0][0].engine.weight_version = "1"
        await setup.fleet.admit((E0,), 1)
        assert setup.registry.in_state(EngineState.SERVING) == ()


@pytest.mark.parametrize("end", ["dies", "is drained"])
async def test_an_engine_that_ends_before_the_router_has_it_does_not_stay_there(end: str) -> None:
    async with started(2) as setup:
        await setup.publish((E0,), 1)
        server, real_add = setup.servers[1][0], setup.router.add

        async def end_then_add(url: str, timeout: float = 0.0) -> None:
            if end == "dies":
                await server.crash()
                await setup.until(lambda: setup.registry.engines["engine-1"].incarnation > 0)
            else:
                await setup.supervisor.scale("engine", 1)
                await setup.until(lambda: "engine-1" not in setup.registry.engines)
            await real_add(url)

        setup.router.add = end_then_add  # type: ignore[method-assign]
        server.engine.weight_version = "1"
        await setup.fleet.admit((E1,), 1)
        assert setup.router.registered == [setup.servers[0][0].engine.url]
        assert (await setup.fleet.members()).serving == (E0,)


async def test_an_engine_that_restarts_while_another_answers_slowly_is_not_admitted() -> None:
    # covers: C8
    async with started(2) as setup:
        for servers in setup.servers:
            servers[0].engine.weight_version = "4"
        slow, record = setup.servers[1][0].engine, setup.registry.engines["engine-0"]
        plain = setup.fleet._server.weight_version

        async def weight_version(url: str, timeout: float) -> str:
            answer = await plain(url, timeout)
            if url == slow.url:  # by now the other one has said that it holds version 4
                await setup.servers[0][0].crash()
                await setup.until(lambda: record.state is EngineState.JOINING and record.incarnation > 0)
            return answer

        setup.fleet._server.weight_version = weight_version  # type: ignore[method-assign]
        errors = await setup.fleet.admit((E0, E1), 4)
        assert "engine-0 was lost and is joining: ended with status -9" in str(errors[E0])
        assert errors[E1] is None
        assert not record.verified
        assert (await setup.fleet.members()).joining == (Incarnation("engine-0", 1),)


async def test_no_step_of_an_update_reaches_the_next_start_of_an_engine() -> None:
    # covers: C8
    async with started(2) as setup:
        await setup.publish((E0, E1), 0)
        await setup.servers[0][0].crash()
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        again, fleet = setup.servers[0][1], setup.fleet
        again.on_host = None  # type: ignore[assignment, method-assign]
        steps = [
            fleet.call((E0, E1), InferenceServer.probe, brief=True),
            fleet.call((E0, E1), InferenceServer.weight_version),
            fleet.call((E0, E1), InferenceServer.join_group, 1, "h", "127.0.0.1", 1, 3, "gloo"),
            fleet.call((E0, E1), InferenceServer.pause, "retract"),
            fleet.call((E0, E1), InferenceServer.flush_cache),
            fleet.on_host((E0, E1), lambda directory: None),
            fleet.call((E0, E1), InferenceServer.begin_update),
            fleet.call((E0, E1), InferenceServer.receive_bucket, "h", BUCKET, 1),
            fleet.call((E0, E1), InferenceServer.receive_handles, "handles", 1, 1),
            fleet.call((E0,), InferenceServer.load_files, "/nowhere", 1),
            fleet.call((E0, E1), InferenceServer.end_update),
            read_held_weights(setup.fleet, (E0, E1), TensorShare()),
            fleet.call((E0, E1), InferenceServer.resume),
            fleet.call((E0, E1), InferenceServer.score, [5, 6]),
            fleet.admit((E0, E1), 1),
            fleet.call((E0, E1), InferenceServer.leave_group, "h", brief=True),
        ]
        for step in steps:
            assert "engine-0 was lost and is joining" in str((await step)[E0])
        await fleet.fence((E0,), "of an update before")
        assert again.engine.calls == again.engine.requests == []
        record = setup.registry.engines["engine-0"]
        assert (record.state, record.incarnation, record.paused) == (EngineState.JOINING, 1, False)


async def test_restarts_are_bounded_and_the_last_engine_ends_the_run() -> None:  # covers: C10
    async with started(1, max_restarts=2) as setup:
        for _ in range(3):
            await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
            await setup.servers[0][-1].crash("ended with status -11. Last lines: out of memory")
            await setup.until(lambda: setup.registry.engines["engine-0"].state is not EngineState.JOINING)
        with pytest.raises(EngineError, match=r"restarted 2 times in 3600 s \(--engine-max-restarts.*out of memory"):
            async with asyncio.timeout(50):
                await setup.supervision
        assert len(setup.servers[0]) == 3


async def test_a_last_engine_that_may_not_restart_is_a_lost_process() -> None:
    """So ``--max-run-restarts`` begins the run anew, as ``--colocate`` promises."""
    async with started(1, max_restarts=0) as setup:
        await setup.servers[0][-1].crash()
        with pytest.raises(ProcessLostError, match=r"no engine is left.*restarted 0 times.*ended with status -9"):
            async with asyncio.timeout(50):
                await setup.supervision


async def test_a_run_continues_without_engines_that_only_evaluate_and_may_get_others() -> None:
    # covers: A9
    async with started(1, max_restarts=0, needed=False) as setup:
        record = setup.registry.engines["engine-0"]
        with capture_logs() as logs:
            await setup.servers[0][-1].crash()
            await setup.until(lambda: record.state is EngineState.GONE)
            await setup.supervisor.scale("engine", 1)
            await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert not setup.supervision.done()
    [told] = [entry for entry in logs if "continues without these engines" in entry["event"]]
    assert "no engine is left; the last, engine-0" in told["error"]


class Late(FakeServer):
    """Starts when another engine is up."""

    setup: Setup

    async def start(self) -> str:
        await self.setup.until(lambda: bool(self.setup.registry.urls()))
        return await super().start()


@pytest.mark.parametrize("kind", [FakeServer, Late])
async def test_an_engine_that_never_comes_up_is_given_up_and_the_run_goes_on(kind: type[FakeServer]) -> None:
    # covers: C10
    def make(index: int, incarnation: int) -> FakeServer:
        if index == 0:
            return FakeServer(FakeEngine())
        return kind(FakeEngine(), start_error=EngineStartError("its GPU is broken"))

    with capture_logs() as logs:
        async with started(2, make=make, max_restarts=2) as setup:
            record = setup.registry.engines["engine-1"]
            await setup.until(lambda: record.state is EngineState.GONE)
            assert len(setup.servers[1]) == 3
            assert all(server.stopped for server in setup.servers[1])
            await setup.publish((E0,), 0)
            assert setup.registry.may_dispatch()
            async with asyncio.timeout(50):
                while not setup.supervision.done():
                    server = setup.servers[0][-1]
                    if server.engine.url:  # else it is still starting
                        await server.crash()
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineError, match=r"no engine is left.*engine-0.*ended with status -9"):
                setup.supervision.result()
    [given_up] = [entry for entry in logs if entry["event"] == "engine given up" and entry["engine"] == "engine-1"]
    assert (given_up["restarts"], given_up["reason"]) == (2, "its GPU is broken")


async def test_an_engine_that_fails_while_the_others_are_up_holds_up_no_start() -> None:
    def make(index: int, incarnation: int) -> FakeServer:
        if index == 0:
            return FakeServer(FakeEngine())
        return Late(FakeEngine(), start_error=EngineStartError("late") if incarnation == 0 else None)

    async with started(2, make=make) as setup:
        record = setup.registry.engines["engine-1"]
        assert (record.state, record.reason) == (EngineState.FENCED, "late")
        await setup.until(lambda: record.state is EngineState.JOINING)
        assert record.restarts == 1


async def test_without_restarts_the_first_start_of_the_last_engine_ends_the_run() -> None:
    error = EngineStartError("no model")
    async with made(2, make=lambda *_: FakeServer(FakeEngine(), start_error=error), max_restarts=0) as setup:
        with pytest.raises(EngineStartError, match="no model"):
            await setup.supervisor.start()
        assert [len(servers) for servers in setup.servers] == [1, 1]


async def test_a_node_that_lacks_files_ends_the_start_of_a_run() -> None:
    """And not by a restart: the error is the user's to mend."""
    # covers: C10
    problem = ConfigurationError("--weight-staging-dir: expected a directory that all nodes share")

    def make(index: int, incarnation: int) -> FakeServer:
        return FakeServer(FakeEngine()) if index == 0 else Late(FakeEngine(), start_error=problem)

    async with made(2, make=make) as setup:
        with pytest.raises(ConfigurationError, match="--weight-staging-dir"):
            await setup.supervisor.start()
        assert [len(servers) for servers in setup.servers] == [1, 1]
        assert all(server.stopped for servers in setup.servers for server in servers)


async def test_a_node_that_lacks_files_later_costs_the_engine_that_was_to_start_there() -> None:
    def make(index: int, incarnation: int) -> FakeServer:
        error = ConfigurationError("this node has no model") if (index, incarnation) == (1, 1) else None
        return FakeServer(FakeEngine(), start_error=error)

    async with started(2, make=make, max_restarts=2) as setup:
        await setup.servers[1][0].crash("its actor is gone")
        await setup.until(lambda: setup.registry.engines["engine-1"].incarnation == 2)
        await setup.until(lambda: setup.registry.engines["engine-1"].state is EngineState.JOINING)
        assert not setup.supervision.done()


async def test_an_old_restart_does_not_count() -> None:  # covers: C10
    async with started(1, max_restarts=1, restart_window=0.05) as setup:
        for _ in range(4):
            await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
            await asyncio.sleep(0.06)
            await setup.servers[0][-1].crash("ended with status -11")
            await setup.until(lambda: setup.registry.engines["engine-0"].state is not EngineState.JOINING)
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert setup.registry.engines["engine-0"].restarts == 4


async def test_a_first_start_that_fails_is_tried_again() -> None:
    def make(index: int, incarnation: int) -> FakeServer:
        error = EngineStartError("a neighbour took the memory") if index == 1 and incarnation < 2 else None
        return FakeServer(FakeEngine(), start_error=error)

    async with started(2, make=make, max_restarts=2) as setup:
        await setup.until(lambda: len(setup.registry.in_state(EngineState.JOINING)) == 2)
        assert [len(servers) for servers in setup.servers] == [1, 3]
        assert setup.servers[1][0].stopped


async def test_engines_that_all_fail_to_start_are_tried_once_more_and_not_for_long() -> None:
    class Failing(FakeServer):
        async def start(self) -> str:
            await asyncio.sleep(0.01)
            return await super().start()

    error = EngineStartError("no such model")
    async with made(2, make=lambda *_: Failing(FakeEngine(), start_error=error), max_restarts=10) as setup:
        with pytest.raises(EngineStartError, match="no such model"):
            await setup.supervisor.start()
        assert max(len(servers) for servers in setup.servers) == 2
        assert all(server.stopped for servers in setup.servers for server in servers)


# ------------------------------------------------------------------------------------------------ how many
async def test_a_group_grows_and_its_new_engines_join() -> None:  # covers: R4
    async with started(1) as setup:
        await setup.publish((E0,), 3)
        setup.servers.append([])
        await setup.supervisor.scale("engine", 2)
        await setup.until(lambda: bool(setup.registry.in_state(EngineState.JOINING)))
        assert setup.registry.may_dispatch(), "the one that serves goes on"
        await setup.publish((E1,), 3)
        assert (await setup.fleet.members()).serving == (E0, E1)


async def test_an_engine_that_is_not_wanted_finishes_its_requests_first() -> None:  # covers: R4
    async with started(2) as setup:
        await setup.publish((E0, E1), 3)
        engine = setup.servers[1][0].engine
        engine.token_seconds = 0.02
        async with setup.request(engine, tokens=20) as response:
            await setup.supervisor.scale("engine", 1)
            await setup.until(lambda: setup.registry.engines["engine-1"].state is EngineState.DRAINING)
            assert setup.registry.answering_at(engine.url) is not None, "its answers count"
            assert (await setup.fleet.members()).serving == (E0,), "no publication waits for it"
            assert len((await response.json())["output_ids"]) == 20
        await setup.until(lambda: "engine-1" not in setup.registry.engines)
        assert setup.servers[1][0].stopped
        assert setup.router.registered == [setup.servers[0][0].engine.url]
        assert len(setup.servers[1]) == 1, "it is not restarted"
        assert set((await setup.fleet.call((E0, E1), InferenceServer.pause, "retract"))) == {E0, E1}


async def test_a_run_ends_when_its_last_engine_is_given_up_while_another_is_drained() -> None:
    async with started(2, max_restarts=0) as setup:
        await setup.publish((E0, E1), 3)
        engine = setup.servers[1][0].engine
        engine.token_seconds = 0.05
        async with setup.request(engine, tokens=20):
            await setup.supervisor.scale("engine", 1)
            await setup.servers[0][0].crash()
            await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.GONE)
            assert not setup.supervision.done(), "a request is still answered"
        with pytest.raises(ProcessLostError, match=r"no engine is left; the last, engine-0,.*ended with status -9"):
            async with asyncio.timeout(50):
                await setup.supervision


async def test_an_engine_can_go_before_it_is_up_and_come_again() -> None:
    async with started(2) as setup:
        await setup.publish((E0,), 0)
        await setup.supervisor.scale("engine", 1)
        await setup.until(lambda: "engine-1" not in setup.registry.engines)
        await setup.supervisor.scale("engine", 2)
        await setup.until(lambda: bool(setup.registry.in_state(EngineState.JOINING)))
        assert len(setup.servers[1]) == 2
        [again] = (await setup.fleet.members()).joining
        assert (again.engine, again.number > E1.number) == ("engine-1", True), "another start than the one before"


@pytest.mark.parametrize(("group", "engines", "message"), [("other", 1, "no group other; there are engine"),
                                                           ("engine", 0, "at least one has to be left"),
                                                           ("engine", -1, "at least one")])  # fmt: skip
async def test_groups_that_cannot_be_scaled(group: str, engines: int, message: str) -> None:
    async with started(1) as setup:
        await asyncio.sleep(0)
        with pytest.raises(ConfigurationError, match=message):
            await setup.supervisor.scale(group, engines)


async def test_an_engine_that_comes_to_hold_another_version_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C8
    monkeypatch.setattr("miles_async.engines.health._PROBE_INTERVAL", 0.02)
    async with started(2) as setup:
        await setup.publish((E0, E1), 3)
        await asyncio.sleep(0.1)
        assert len(setup.registry.in_state(EngineState.SERVING)) == 2
        setup.servers[0][0].engine.weight_version = "2"  # somebody else's doing
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert setup.registry.engines["engine-0"].reason == "says that it holds version 2, and was given 3"
        assert setup.registry.engines["engine-1"].restarts == 0


async def test_an_engine_that_lives_and_does_not_answer_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C10
    monkeypatch.setattr("miles_async.engines.health._PROBE_INTERVAL", 0.01)
    async with started(1) as setup:
        await setup.publish((E0,), 3)
        await setup.fleet.call((E0,), InferenceServer.pause, "retract")
        await asyncio.sleep(0.2)
        assert len(setup.servers[0]) == 1, "a paused engine answers, and is not ill"
        await setup.servers[0][0].engine.die()  # the machine is gone; nobody sees the process end
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert setup.registry.engines["engine-0"].reason == "did not answer 6 times in a row"
        assert len(setup.servers[0]) == 2


async def test_an_engine_that_answers_and_generates_nothing_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C10
    monkeypatch.setattr("miles_async.engines.health._PROGRESS_INTERVAL", 0.01)
    monkeypatch.setattr("miles_async.engines.health._PROGRESS_SECONDS", 0.05)
    async with started(2) as setup:
        await setup.publish((E0, E1), 3)
        await setup.fleet.call((E0, E1), InferenceServer.pause, "retract")
        await asyncio.sleep(0.3)
        assert [len(started) for started in setup.servers] == [1, 1], "a paused engine is not stuck"
        await setup.fleet.call((E0, E1), InferenceServer.resume)
        monkeypatch.setattr("miles_async.engines.health._PROGRESS_SECONDS", 10.0)  # for the one that is not stuck
        setup.servers[0][0].engine.stuck = True
        await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
        assert setup.registry.engines["engine-0"].reason == "generated nothing 5 times in a row"
        assert setup.registry.engines["engine-1"].restarts == 0


async def test_an_engine_that_answers_wrongly_is_restarted_after_a_few() -> None:
    # covers: A3, C10
    def lengthen(reply: JsonDict) -> JsonDict:
        reply["output_ids"].append(9)
        reply["meta_info"]["completion_tokens"] += 1
        reply["meta_info"]["output_token_logprobs"].append([-0.5, 9, None])
        reply["meta_info"]["weight_versions"][-1]["end"] += 1
        return reply

    async with started(2) as setup:
        await setup.publish((E0, E1), 3)
        wrong, record = setup.servers[0][0].engine, setup.registry.engines["engine-0"]
        wrong.transform = lengthen
        client = client_of(setup.http, setup.registry, lambda: wrong.url, setup.traffic, retries=9)
        request = GenerateRequest(input_ids=np.array([5], np.int32), sampling={"max_new_tokens": 4}, routing_key="key")
        while record.incarnation == 0:
            answer = await client.generate(request)
            assert answer.output_ids.tolist() == [3, 4, 5, 6], "the other engine answers"
        assert record.reason.startswith("gave 3 wrong answers within 3600 s; the last: ")
        assert "expected at most 4 tokens (max_new_tokens), found 5" in record.reason
        await setup.until(lambda: record.state is EngineState.JOINING)
        assert record.wrong_answers == ()
        assert setup.registry.engines["engine-1"].restarts == 0


class TestSilentEngines:
    """An engine that stops answering is fenced long before its deadlines, if others answer what it does not."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        health = "miles_async.engines.health"
        for name, seconds in {
            "_PROBE_INTERVAL": 0.01,
            "_PROGRESS_INTERVAL": 0.01,
            "_PROBE_PATIENCE": 0.3,
            "_PROGRESS_PATIENCE": 0.3,
            "_LOOK_SECONDS": 0.02,
            "_PATIENCE_FACTOR": 0.0,
        }.items():
            monkeypatch.setattr(f"{health}.{name}", seconds)

    async def published(self, setup: Setup) -> None:
        """Both serve, and have answered often enough that it is known how fast they are."""
        await setup.publish((E0, E1), 3)
        health = setup.supervisor._health
        async with asyncio.timeout(50):
            for question in (health._probes, health._progress):
                for engine in setup.registry.engines:
                    while len(question._seconds.get(engine, ())) < 3:  # noqa: ASYNC110, nobody is told
                        await asyncio.sleep(0.01)

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("/model_info", "did not answer within 0.3 s, and others did"),
            ("/health_generate", "generated nothing for longer than ever, while others did"),
        ],
    )
    async def test_it_is_restarted(self, path: str, reason: str) -> None:  # covers: C10
        async with started(2) as setup:
            await self.published(setup)
            setup.servers[0][0].engine.silent.add(path)
            await setup.until(lambda: setup.registry.engines["engine-0"].state is EngineState.JOINING)
            assert setup.registry.engines["engine-0"].reason == reason
            assert setup.registry.engines["engine-1"].restarts == 0

    @pytest.mark.parametrize("path", ["/model_info", "/health_generate"])
    async def test_it_is_left_alone_while_nobody_answers(self, path: str) -> None:
        async with started(2) as setup:
            await self.published(setup)
            for (server,) in setup.servers:
                server.engine.silent.add(path)
            await asyncio.sleep(1.0)
            assert [len(started) for started in setup.servers] == [1, 1]

    async def test_it_is_left_alone_if_it_was_always_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("miles_async.engines.health._PATIENCE_FACTOR", 1000.0)
        async with started(2) as setup:
            await self.published(setup)
            setup.servers[0][0].engine.silent.add("/model_info")
            await asyncio.sleep(1.0)
            assert [len(started) for started in setup.servers] == [1, 1]

    async def test_it_is_left_alone_while_its_host_is_out_of_reach(self) -> None:
        class OutOfReach(FakeServer):
            async def on_host(self, *_: object) -> None:
                raise EngineError("its actor does not answer")

        async with started(2, make=lambda *_: OutOfReach(FakeEngine())) as setup:
            await self.published(setup)
            setup.servers[0][0].engine.silent |= {"/model_info", "/health_generate"}
            await asyncio.sleep(1.0)
            assert [len(started) for started in setup.servers] == [1, 1]

    async def test_it_is_left_alone_in_a_pause(self) -> None:
        async with started(2) as setup:
            await self.published(setup)
            setup.servers[0][0].engine.silent.add("/health_generate")
            await setup.fleet.call((E0,), InferenceServer.pause, "retract")
            await asyncio.sleep(1.0)
            assert [len(started) for started in setup.servers] == [1, 1]
