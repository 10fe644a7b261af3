"""An engine that fails during a publication is fenced or repaired, whatever it fails at; requests go on at the other,
and nobody gets a token of weights that are not verified. Two real SGLang servers, the real smg and Megatron; only
proxies before the servers do what broken engines do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.engines.registry import EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.stack import EngineStack
from miles_async.engines.supervisor import EngineGroup
from miles_async.errors import EngineError, PublicationError
from miles_async.runtime.network.addresses import LOCAL
from miles_async.seams import InferenceServer
from miles_async.types import CanaryScore, GenerateRequest, Generation
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.host_files import Source
from miles_async.weights.transports.object_store_rank import ObjectStoreSender
from tests.integration.faulty_engines import Fault, FaultyEngine, PassOn, dies, does_nothing, hangs, refuses
from tests.integration.publishing import (
    Held,
    Publishing,
    Trainer,
    listening_sockets,
    publishing,
    random_sequences,
    until_no_more,
)
from tests.integration.served_models import save_served, served_spec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

BOTH = ("engine-0", "engine-1")
PUBLICATION_SECONDS = 36.0  # six times as long as a step may take
SMALL_BUCKET = 10_000  # bytes: several for each of two senders
MIDDLE = 4  # index of a bucket: the third one of the first of two senders
REQUESTS = 6  # at once
PROMPT = (5, 6, 7, 8)
RECEIVE = {"distributed": "/update_weights_from_distributed", "disk": "/update_weights_from_disk"}

Answers = list[tuple[int, Generation]]
"""With the version that was visible when the request began."""


@dataclass
class Cluster:
    """Two engines that may be made to fail, a router, and a trainer whose weights they are to serve."""

    stack: EngineStack
    engines: dict[str, FaultyEngine]
    trainer: Trainer
    staged: Path
    held_at_first: tuple[int, list[int]] = (0, [])
    waiting: list[asyncio.Future[web.Response]] = field(default_factory=list)  # for servers that others spoke for

    def publishing(self, **options: object) -> AbstractAsyncContextManager[Publishing]:
        limits = {"publication_timeout": PUBLICATION_SECONDS, "engines_timeout": 3.0}
        return publishing(
            self.trainer, self.stack.fleet, self.staged, **({"verify_weights": "canary"} | limits | options)
        )

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[Answers]:
        """While some are sent through the router, one after another. Fails if one of them did, or got older weights
        than those that were visible when it began.
        """
        answers: Answers = []
        tasks = [asyncio.ensure_future(self._send(answers, index)) for index in range(REQUESTS)]
        try:
            yield answers
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        for version, answer in answers:
            assert answer.weight_versions.min() >= version

    async def _send(self, answers: Answers, index: int) -> None:
        for count in itertools.count():
            version = self.stack.registry.version
            sampling = {"max_new_tokens": 12, "ignore_eos": True}
            answer = await self.stack.client.generate(
                GenerateRequest(input_ids=np.array(PROMPT, np.int32), sampling=sampling, routing_key=f"{index}.{count}")
            )
            answers.append((version, answer))

    async def until_joining(self, engine: str) -> None:
        record = self.stack.registry.engines[engine]
        async with asyncio.timeout(120):
            await self.stack.registry.wait_until(lambda: record.state is EngineState.JOINING)

    async def assert_all_hold_what_was_trained(self) -> None:
        for engine in BOTH:
            record = self.stack.registry.engines[engine]
            assert record.state is EngineState.SERVING
            assert record.verified
            assert record.version == self.trainer.version
        for sequence in random_sequences():
            both = [record.current for record in self.stack.registry.engines.values()]
            for score in (await self.stack.fleet.call(both, InferenceServer.score, sequence)).values():
                assert isinstance(score, CanaryScore)
                assert score.weight_version == str(self.trainer.version)
                np.testing.assert_allclose(score.logprobs, self.trainer.logprobs(sequence), atol=1e-4)

    def held(self) -> Held:
        """Count what publications could leave: listening sockets here, and what the schedulers have open."""
        return listening_sockets(), [engine.scheduler().num_fds() for engine in self.engines.values()]


async def more(answers: Answers, count: int = REQUESTS) -> set[str]:
    """Waits for as many more; the engines that gave them."""
    start = len(answers)
    async with asyncio.timeout(30):
        while len(answers) < start + count:  # noqa: ASYNC110  (the client tells nobody)
            await asyncio.sleep(0.02)
    return {answer.engines[0] for _, answer in answers[start:]}


async def until_answered_by(engine: str, answers: Answers) -> None:
    async with asyncio.timeout(30):
        while engine not in await more(answers):
            pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("faults")
    model = save_served("qwen3-tied", folder / "model", seed=0)
    logs = folder / "logs"
    limits = WeightsArguments(publication_timeout=PUBLICATION_SECONDS)
    spec = served_spec(model, logs, engine_imports, weight_group_seconds=limits.group_timeout)
    engines = {engine: FaultyEngine(partial(ServerProcess, SGLANG, spec), index) for index, engine in enumerate(BOTH)}
    stack = EngineStack(
        [EngineGroup(engines=2, streams=True, launch=lambda index, _: engines[BOTH[index]])],
        EnginesArguments(request_timeout=60.0, engine_start_timeout=200.0, engine_max_restarts=1000),
        limits,
        log_dir=logs,
        network=LOCAL,
        calls=SGLangServer,
    )
    await stack.start()
    supervision = asyncio.ensure_future(stack.supervise())
    trainer = Trainer(model)
    result = Cluster(stack, engines, trainer, folder / "staged")
    try:
        async with result.publishing() as published:
            await published.next()
        result.held_at_first = result.held()
        yield result
    finally:
        trainer.close()
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        for engine in engines.values():
            await engine.close()
        await stack.stop()
    assert psutil.wait_procs([process for engine in engines.values() for process in engine.processes], 10)[1] == []


async def claims_another_version(_: FaultyEngine, pass_on: PassOn) -> web.Response:
    answer = await pass_on()
    assert isinstance(answer.body, bytes)
    body = answer.body.replace(b'"weight_version":"', b'"weight_version":"1')
    return web.Response(body=body, status=answer.status, content_type=answer.content_type)


FAULTS: dict[str, tuple[str, Fault]] = {
    "hangs before": ("/server_info", hangs),
    "hangs when it should pause": ("/pause_generation", hangs),
    "hangs when it should go on": ("/continue_generation", hangs),
    "refuses to receive": ("receive", refuses),
    "hangs as it receives": ("receive", hangs),
    "answers 200 and receives nothing": ("receive", does_nothing),
    "claims another version": ("/model_info", claims_another_version),
}
# As in the middle of the weights, as the engine that the router still lists, as an engine that answers nothing at all.
AT_NIGHT = (
    *("hangs when it should pause", "hangs as it receives", "refuses to receive"),
    *("hangs before", "hangs when it should go on"),
)
BY_FILES = ("refuses to receive", "hangs as it receives", "answers 200 and receives nothing")


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        *(("distributed", fault) for fault in FAULTS if fault not in AT_NIGHT),
        *(pytest.param("distributed", fault, marks=pytest.mark.long) for fault in AT_NIGHT),
        *(pytest.param("disk", fault, marks=pytest.mark.long) for fault in BY_FILES),
    ],
)
async def test_an_engine_that_fails_is_fenced_and_repaired(cluster: Cluster, transport: str, fault: str) -> None:
    # covers: A3, C8, R4
    path, faulty = FAULTS[fault]
    engine = cluster.engines["engine-0"]
    async with cluster.publishing(weight_transport=transport) as published, cluster.requests() as answers:
        await published.next()
        await more(answers)
        engine.faults = {RECEIVE[transport] if path == "receive" else path: faulty}
        publication = await published.next()
        assert publication.engines == ("engine-1",)
        by_health_check = fault == "claims another version" and publication.fenced == ()  # which saw it first
        assert publication.fenced == ("engine-0",) or by_health_check
        assert cluster.stack.registry.version == cluster.trainer.version
        assert await more(answers) == {"engine-1"}
        engine.faults = {}
        engine.scheduler().resume()
        await cluster.until_joining("engine-0")
        assert await published.publisher.repair() == ("engine-0",)
        await cluster.assert_all_hold_what_was_trained()
        await until_answered_by("engine-0", answers)


async def test_a_stale_engine_that_the_router_still_lists_serves_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: A3, C8, R4
    async def not_listening(url: str) -> None:
        raise EngineError("router: DELETE: no answer")

    stale = cluster.engines["engine-0"]
    monkeypatch.setattr(cluster.stack.router, "remove", not_listening)
    monkeypatch.setattr(stale, "keeps_address", True)
    async with cluster.publishing() as published, cluster.requests() as answers:
        await published.next()
        stale.faults = {RECEIVE["distributed"]: refuses}
        publication = await published.next()
        assert (publication.engines, publication.fenced) == (("engine-1",), ("engine-0",))
        stale.faults = {}
        asked = stale.passed_on.count("/generate")
        assert await more(answers, 10 * REQUESTS) == {"engine-1"}
        assert stale.passed_on.count("/generate") > asked
        assert await published.publisher.repair() == ("engine-0",)
        await cluster.assert_all_hold_what_was_trained()
        await until_answered_by("engine-0", answers)


async def test_while_no_engine_is_left_everybody_waits_up_to_a_deadline(cluster: Cluster) -> None:
    # covers: C8, C10
    async with cluster.publishing() as published, cluster.requests() as answers:
        await published.next()
        for engine in cluster.engines.values():
            engine.may_start.clear()
            engine.faults = {RECEIVE["distributed"]: refuses}
        lost = r"waited 3 s for an engine to publish to; starting: .*engine-0.*engine-1.*; engine-\d was lost: send: .*"
        with pytest.raises(PublicationError, match=lost + "not now"):
            await published.next()
        assert not cluster.stack.registry.may_dispatch()
        for engine in cluster.engines.values():
            engine.faults = {}
        waiting = asyncio.ensure_future(published.next())
        await asyncio.sleep(1.0)
        for engine in cluster.engines.values():
            engine.may_start.set()
        assert (await waiting).engines == BOTH
        await cluster.assert_all_hold_what_was_trained()
        await more(answers)


@pytest.mark.long
async def test_an_engine_that_dies_as_it_receives_is_restarted_and_repaired(cluster: Cluster) -> None:
    # covers: A3, C8
    engine = cluster.engines["engine-0"]
    async with cluster.publishing() as published, cluster.requests() as answers:
        await published.next()
        await more(answers)
        engine.faults = {RECEIVE["distributed"]: dies}
        publication = await published.next()
        assert (publication.engines, publication.fenced) == (("engine-1",), ("engine-0",))
        engine.faults = {}
        await more(answers)
        await cluster.until_joining("engine-0")
        assert await published.publisher.repair() == ("engine-0",)
        await cluster.assert_all_hold_what_was_trained()
        await until_answered_by("engine-0", answers)


def shares_memory(engine: FaultyEngine) -> bool:
    """True while the engine receives weights in memory that others of its node read, or reads it."""
    return "memfd:weights" in Path(f"/proc/{engine.scheduler().pid}/maps").read_text()


IN_THE_MIDDLE: dict[str, Callable[[FaultyEngine], None]] = {
    "dies": lambda engine: engine.server().kill(),
    "hangs": lambda engine: engine.scheduler().suspend(),
    "hangs and says that it has everything": lambda engine: engine.scheduler().suspend(),
}


@pytest.mark.parametrize(
    ("fault", "senders"),
    [
        ("hangs", 2),
        *(pytest.param(fault, 2, marks=pytest.mark.long) for fault in IN_THE_MIDDLE if fault != "hangs"),
        *(pytest.param(fault, 1, marks=pytest.mark.long) for fault in IN_THE_MIDDLE),
    ],
)
async def test_an_engine_that_fails_in_the_middle_of_the_weights_is_restarted_and_repaired(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fault: str, senders: int
) -> None:
    # covers: A3, C8, C10
    engine, plain, failed = cluster.engines["engine-0"], DistributedSender._on_device, []
    sharing: list[bool] = []

    def load(sender: DistributedSender, version: int, index: int) -> object:
        if index == MIDDLE:
            sharing.append(all(map(shares_memory, cluster.engines.values())))
        if index == MIDDLE and armed and not failed:
            failed.append(index)
            IN_THE_MIDDLE[fault](engine)
        return plain(sender, version, index)

    async def lies(_: FaultyEngine, pass_on: PassOn) -> web.Response:
        """Answer as soon as its scheduler hangs."""
        passed_on = asyncio.ensure_future(pass_on())
        while not failed:  # noqa: ASYNC110  (a thread of the sender's makes it hang)
            await asyncio.sleep(0.01)
        cluster.waiting.append(passed_on)
        return await does_nothing(engine, pass_on)

    armed = False
    monkeypatch.setattr(DistributedSender, "_on_device", load)
    async with (
        cluster.publishing(senders=senders, update_weight_buffer_size=SMALL_BUCKET) as published,
        cluster.requests() as answers,
    ):
        started = asyncio.get_running_loop().time()
        staged = await published.next()
        healthy = asyncio.get_running_loop().time() - started
        assert staged.fenced == ()
        assert sharing == [True]
        await more(answers)
        armed = True
        if "says" in fault:
            engine.faults = {RECEIVE["distributed"]: lies}
        started = asyncio.get_running_loop().time()
        publication = await published.next()
        assert failed == [MIDDLE]
        assert (publication.engines, publication.fenced) == (("engine-1",), ("engine-0",))
        assert asyncio.get_running_loop().time() - started < 2 * PUBLICATION_SECONDS / 6 + max(4.0, 3 * healthy)
        engine.faults = {}
        if engine.server().is_running() and "hangs" in fault:
            engine.scheduler().resume()
        await cluster.until_joining("engine-0")
        assert await published.publisher.repair() == ("engine-0",)
        await cluster.assert_all_hold_what_was_trained()
        await until_answered_by("engine-0", answers)


@pytest.mark.long
async def test_an_engine_that_restarted_takes_the_files_of_its_neighbour(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: A3, C8
    sent: list[str] = []
    plain = ObjectStoreSender.put_file

    def put_file(sender: ObjectStoreSender, version: int, name: str) -> list[Source]:
        sent.append(name)
        return plain(sender, version, name)

    monkeypatch.setattr(ObjectStoreSender, "put_file", put_file)
    async with cluster.publishing(weight_transport="object_store", weight_delta="xor") as published:
        await published.next()
        await published.next()
        assert sent
        sent.clear()
        cluster.engines["engine-0"].server().kill()
        await cluster.until_joining("engine-0")
        assert await published.publisher.repair() == ("engine-0",)
        assert sent == []
        await cluster.assert_all_hold_what_was_trained()


async def test_no_failure_left_anything(cluster: Cluster) -> None:
    """Of all those before."""
    async with cluster.publishing() as published:
        await published.next()
    await until_no_more(cluster.held, cluster.held_at_first)
