"""One real SGLang server behind a real smg, placed by Ray; and the contract that holds FakeEngine to it.

The first half runs the same assertions on the fake and on the server, through the engine's own port. The second
half drives the whole stack: generation, publications over gloo in every pause mode, crashes, and the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from msgspec import structs

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.engines.http import Http
from miles_async.engines.placement import RayServers
from miles_async.engines.registry import EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.answers import MEDIA_TYPE, PACK, read_answer
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.sglang.scores import PACK_SCORES, read_scores
from miles_async.engines.stack import EngineStack
from miles_async.engines.supervisor import EngineGroup
from miles_async.errors import EngineError, EngineStartError, RequestRejectedError
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.runtime.network.addresses import LOCAL
from miles_async.seams import InferenceServer
from miles_async.staleness.versions import token_versions
from miles_async.trajectory.turn import take_turn
from miles_async.types import GenerateRequest, Generation, Incarnation, Int32, JsonObject, TensorMeta
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.spec import RankSide
from tests.fakes.fake_engine import FakeEngine
from tests.integration.real_run import command_line
from tests.integration.served_models import reference_logprobs, save_served, served_spec
from tests.integration.streamed_request import StreamedRequest, events

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE = "engine-0"
LONG = 450  # tokens: many more than come while something is asked, done soon after
DEADLINE = 30.0


@dataclass
class Running:
    """The stack under test and what belongs to it."""

    stack: EngineStack
    models: tuple[Path, Path]  # two sets of weights
    supervision: asyncio.Task[None]
    pids: set[int] = field(default_factory=set)  # every server or router there ever was

    @property
    def url(self) -> str:
        url = self.stack.registry.engines[ENGINE].url
        assert url is not None
        return url

    async def note_processes(self) -> None:
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or ())
            if str(self.models[0]) in command or self.stack.router.url.rpartition(":")[2] in command:
                self.pids |= {process.pid, *(child.pid for child in process.children(recursive=True))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Running]:
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("engines")
    models = (save_served("qwen3-tied", folder / "m0", seed=0), save_served("qwen3-tied", folder / "m1", seed=1))
    ray.init(
        "local",  # not what another test has started
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=_environment(),
    )
    spec = served_spec(models[0], folder / "logs", engine_imports)
    stack = EngineStack(
        [EngineGroup(engines=1, streams=True, launch=RayServers(SGLANG, spec))],
        EnginesArguments(request_timeout=120.0, engine_start_timeout=200.0),
        WeightsArguments(publication_timeout=60.0),
        log_dir=folder / "logs",
        network=LOCAL,
        calls=SGLangServer,
    )
    await stack.start()
    result = Running(stack, models, asyncio.ensure_future(stack.supervise()))
    await result.note_processes()
    try:
        yield result
    finally:
        result.supervision.cancel()
        await asyncio.gather(result.supervision, return_exceptions=True)
        await stack.stop()
        ray.shutdown()
    left = [pid for pid in result.pids if _alive(pid)]
    assert left == []


def _environment() -> dict[str, object]:
    root = str(Path(__file__).parents[2])
    return {"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}}


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------- contract: fake and real alike
@dataclass
class Engine:
    """An engine by its URL."""

    url: str
    http: Http
    api: SGLangServer

    async def generate(self, tokens: int, ids: Sequence[int] = (5, 6, 7, 8), **fields: object) -> JsonObject:
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **fields}
        return await self.post("/generate", body)

    async def post(self, path: str, body: dict[str, object], status: int = 200) -> Any:
        async with self.http.session.post(self.url + path, json=body) as response:
            assert response.status == status, await response.text()
            return await response.json() if "json" in response.content_type else await response.text()

    async def begun(self, **fields: object) -> StreamedRequest:
        """A request of LONG tokens, of which some are there."""
        sampling = {"max_new_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True, **fields}
        request = StreamedRequest(self.http, self.url, body)
        await request.goes_on()
        return request

    async def name_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fake", "sglang"])
async def engine(request: pytest.FixtureRequest, running: Running) -> AsyncIterator[Engine]:
    http = Http()
    async with FakeEngine(token_seconds=0.004) as fake:
        url = fake.url if request.param == "fake" else running.url
        yield Engine(url, http, SGLangServer(http))
    await http.close()


async def test_an_answer_has_a_log_prob_per_token_and_spans_that_cover_it(engine: Engine) -> None:
    await engine.name_version("1")
    reply = await engine.generate(6, rid="my-id")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 6
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert (meta["id"], meta["finish_reason"]["type"], meta["prompt_tokens"]) == ("my-id", "length", 4)
    assert meta["completion_tokens"] == 6
    assert meta["weight_version"] == "1"
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]
    assert await engine.api.weight_version(engine.url, DEADLINE) == "1"


async def test_an_answer_is_packed_on_request_with_the_same_log_probs_to_the_last_bit(engine: Engine) -> None:
    # covers: C12
    """Fails when ``packed_answers.py`` no longer fits SGLang."""
    await engine.name_version("1")
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}
    answers, content_types, reported = [], [], []

    def versions(spans: object, label: object, tokens: int) -> Int32:
        reported.append(spans)
        return np.ones(tokens, np.int32)

    for extra in ({"extra_key": "a"}, {"extra_key": "b", PACK: True}):  # neither finds a prefix in the cache
        async with engine.http.session.post(f"{engine.url}/generate", json=body | extra) as response:
            content_types.append(response.content_type)
            answers.append(read_answer(await response.read(), response.content_type, engine.url, versions))
    plain, packed = answers
    assert content_types == ["application/json", MEDIA_TYPE]
    assert packed.logprobs.tobytes() == plain.logprobs.tobytes()
    assert packed.output_ids.tolist() == plain.output_ids.tolist()
    assert (packed.finish_reason, packed.prompt_tokens) == ("length", 4)
    assert reported == 2 * [[{"version": "1", "start": 0, "end": 64}]]


@pytest.mark.parametrize("packs", [False, True])
async def test_a_stream_has_tokens_while_they_are_sampled_and_the_answer_at_its_end(
    engine: Engine, packs: bool
) -> None:
    # covers: C12
    """Fails when ``packed_answers.py`` no longer fits SGLang."""
    await engine.name_version("1")
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True, PACK: packs}
    came: list[tuple[int, float]] = []
    answers = []
    versions = partial(token_versions, dispatch_version=1, tokens_in_flight=1)
    last = b""
    async for last in events(engine.http, engine.url, body | {"extra_key": f"streamed {packs}"}):
        assert not answers or last == b"[DONE]"
        event = engine.api.read_event(last, len(came), engine.url)
        came += [(token, asyncio.get_running_loop().time()) for token in event.token_ids]
        answers += [] if event.answer is None else [read_answer(*event.answer, engine.url, versions)]
    assert last == b"[DONE]"
    [streamed] = answers
    assert [token for token, _ in came] == streamed.output_ids.tolist()[: len(came)]
    assert came[-1][1] > came[0][1]
    assert len(came) >= 32
    whole = await engine.generate(64, sampling_params=sampling, extra_key=f"whole {packs}")
    assert streamed.output_ids.tolist() == whole["output_ids"]
    whole_logprobs = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]]
    assert streamed.logprobs.tolist() == np.array(whole_logprobs, np.float32).tolist()
    assert (streamed.finish_reason, streamed.prompt_tokens) == ("length", 4)


async def test_an_aborted_stream_ends_with_the_tokens_that_there_are(engine: Engine) -> None:
    sampling = {"max_new_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True, "rid": "streamed", PACK: True}
    tokens, answers, aborted = 0, [], False
    versions = partial(token_versions, dispatch_version=1, tokens_in_flight=1)
    await engine.name_version("1")
    async for data in events(engine.http, engine.url, body):
        event = engine.api.read_event(data, tokens, engine.url)
        tokens += len(event.token_ids)
        answers += [] if event.answer is None else [read_answer(*event.answer, engine.url, versions)]
        if tokens >= 3 and not aborted:
            aborted = True
            await engine.api.abort(engine.url, "streamed", DEADLINE)
    [answer] = answers
    assert answer.finish_reason == "abort"
    assert tokens <= len(answer.output_ids) < LONG


async def test_a_refusal_is_an_event_of_a_stream(engine: Engine) -> None:  # covers: A5
    body: dict[str, object] = {"input_ids": [3] * 100_000, "sampling_params": {"max_new_tokens": 1}, PACK: True}
    came = [data async for data in events(engine.http, engine.url, body)]
    with pytest.raises(RequestRejectedError, match=r"HTTP 400: .*longer than"):
        engine.api.read_event(came[0], 0, engine.url)
    assert came[1:] == [b"[DONE]"]


async def test_an_engine_without_speculative_decoding_has_one_token_in_flight(engine: Engine) -> None:
    # covers: C1
    assert await engine.api.probe(engine.url, DEADLINE) == 1


async def test_only_an_engine_that_goes_on_makes_progress(engine: Engine) -> None:  # covers: C10
    await engine.api.make_progress(engine.url, DEADLINE)
    await engine.api.pause(engine.url, "retract", DEADLINE)
    try:
        with pytest.raises(EngineError, match="no answer within 3 s"):
            await engine.api.make_progress(engine.url, 3.0)
        # The router asks for this twice before it takes an engine: an answer may not wait for a token.
        async with asyncio.timeout(60), Http().session as session, session.get(f"{engine.url}/health") as response:
            assert response.status == 200
    finally:
        await engine.api.resume(engine.url, DEADLINE)
    await engine.api.make_progress(engine.url, DEADLINE)


async def test_the_extra_key_separates_prefix_caches(engine: Engine) -> None:  # covers: C8
    ids = [9, 10, 11, 12, 13, 14]
    cached = [
        (await engine.generate(1, ids, extra_key=key))["meta_info"]["cached_tokens"] for key in ("v1", "v1", "v2")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


async def test_a_version_that_changes_on_the_way_makes_two_spans(engine: Engine) -> None:  # covers: M1
    await engine.name_version("1")
    request = await engine.begun()
    await engine.name_version("2")
    meta = (await request.reply)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["1", "2"]
    assert meta["weight_versions"][0]["end"] == meta["weight_versions"][1]["start"]
    assert meta["weight_versions"][1]["end"] == LONG
    assert meta["weight_version"] == "2"


async def test_a_paused_engine_gives_its_memory_up_and_takes_it_back(engine: Engine) -> None:
    """On CPU it keeps it; this shows the order of calls and their form."""
    await engine.api.pause(engine.url, "retract", DEADLINE)
    await engine.api.release_memory(engine.url, DEADLINE)
    await engine.api.retake_memory(engine.url, DEADLINE)
    await engine.api.resume(engine.url, DEADLINE)
    assert len((await engine.generate(4))["output_ids"]) == 4


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_modes(engine: Engine, mode: str) -> None:  # covers: M11
    await engine.name_version("1")
    request = await engine.begun()
    await engine.api.pause(engine.url, mode, DEADLINE)
    await asyncio.wait([request.reply], timeout=DEADLINE if mode == "abort" else 0.1)
    assert request.reply.done() == (mode == "abort")
    if mode == "in_place":
        with pytest.raises(EngineError, match="400"):
            await engine.api.flush_cache(engine.url, DEADLINE)
    else:
        await engine.api.flush_cache(engine.url, DEADLINE)
    late = asyncio.ensure_future(engine.generate(2))
    await engine.name_version("2")
    await asyncio.sleep(0.1)
    assert not late.done()
    await engine.api.resume(engine.url, DEADLINE)
    assert len((await late)["output_ids"]) == 2
    reply = await request.reply
    versions = [span["version"] for span in reply["meta_info"]["weight_versions"]]
    if mode == "abort":
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < LONG
        assert versions == ["1"]
    else:
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
        assert len(reply["output_ids"]) == LONG == len(reply["meta_info"]["output_token_logprobs"])
        assert versions == ["1", "2"]


async def test_abort_is_by_exact_id(engine: Engine) -> None:
    request = await engine.begun(rid="request-12")
    await engine.api.abort(engine.url, "request-1", DEADLINE)
    await request.goes_on()
    await engine.api.abort(engine.url, "request-12", DEADLINE)
    reply = await request.reply
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) < LONG


async def test_scores_cover_all_but_the_first_token_whatever_is_cached(engine: Engine) -> None:
    tokens = [5, 6, 7, 8, 9]
    scores = [await engine.api.score(engine.url, tokens, DEADLINE) for _ in range(2)]
    assert len(scores[0].logprobs) == 4
    assert scores[0].logprobs == pytest.approx(scores[1].logprobs, abs=1e-6)
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    for packs, content_type in ((False, "application/json"), (True, MEDIA_TYPE)):
        asked = body | {"logprob_start_len": 0, PACK_SCORES: packs}
        async with engine.http.session.post(f"{engine.url}/generate", json=asked) as response:
            assert response.content_type == content_type  # fails when ``packed_answers.py`` no longer fits SGLang
            scores.append(read_scores(await response.read(), 4, engine.url))
            assert scores[-1].logprobs == pytest.approx(scores[0].logprobs, abs=1e-6)
    rest = await engine.api.score(engine.url, tokens, DEADLINE, first=3)
    assert rest.logprobs == pytest.approx(scores[0].logprobs[2:], abs=1e-6)
    with pytest.raises(RequestRejectedError, match="longer than"):
        await engine.api.score(engine.url, [3] * 100_000, DEADLINE)


async def test_the_load_shows_running_requests(engine: Engine) -> None:  # covers: C4
    tasks = [asyncio.ensure_future(engine.generate(LONG)) for _ in range(3)]
    async with asyncio.timeout(DEADLINE):
        while (load := await engine.api.load(engine.url, DEADLINE)).running < 3:  # noqa: ASYNC110, the server tells nobody
            await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)
    assert load.waiting == 0
    assert 0 < load.kv_use < 0.5
    await asyncio.gather(*tasks)
    async with asyncio.timeout(DEADLINE):
        while (load := await engine.api.load(engine.url, DEADLINE)).running:  # noqa: ASYNC110, the server tells nobody
            await asyncio.sleep(0.01)
    assert (load.waiting, load.kv_use) == (0, 0.0)


async def test_unusable_requests_are_refused(engine: Engine) -> None:
    await engine.post("/generate", {"sampling_params": {"max_new_tokens": 1}}, status=400)
    with pytest.raises(EngineError, match="begin_weight_update"):
        await engine.api.receive_bucket(engine.url, "none", (TensorMeta("a", "float32", (1,)),), 1, DEADLINE)
    with pytest.raises(EngineError, match="does not exist"):
        await engine.api.leave_group(engine.url, "none", DEADLINE)


# --------------------------------------------------------------------------------------- the whole stack
class Trainer:
    """The sending rank of a publication, without a trainer: weights of a saved model over gloo."""

    def __init__(self, model: Path) -> None:
        from miles_async.weights.transports.distributed.rank import DistributedSender

        self.model = model
        staging = StagingOptions(parent=model / "staged", bucket_bytes=100_000)
        self.sender = DistributedSender(
            RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=60)
        )

    @asynccontextmanager
    async def connected(self, stack: EngineStack) -> AsyncIterator[None]:
        """In one process group with the engine."""
        address, port = self.sender.open_group("g", 2)
        _, joined = await asyncio.gather(
            asyncio.to_thread(self.sender.join_group, "g"),
            stack.fleet.call(one(stack), InferenceServer.join_group, 1, "g", address, port, 2, "gloo"),
        )
        assert joined == dict.fromkeys(one(stack))
        yield
        left, _ = await asyncio.gather(
            stack.fleet.call(one(stack), InferenceServer.leave_group, "g", brief=True),
            asyncio.to_thread(self.sender.leave_group, "g"),
        )
        assert left == dict.fromkeys(one(stack))
        self.sender.close()

    def stage(self, version: int) -> None:
        from safetensors.torch import load_file

        self.sender.copy(version, load_file(self.model / "model.safetensors").items())
        assert len(self.sender.stage(version).buckets) > 1

    async def publish(self, stack: EngineStack, version: int, mode: str) -> None:
        """The steps of weights.publisher from the pause to the verification, asserting that no engine fails."""
        fleet, engine = stack.fleet, one(stack)
        assert await fleet.call(engine, InferenceServer.pause, mode) == dict.fromkeys(engine)
        if mode != "in_place":
            assert await fleet.call(engine, InferenceServer.flush_cache) == dict.fromkeys(engine)
        _, received = await asyncio.gather(
            asyncio.to_thread(self.sender.send, "g", version, True),
            fleet.call(engine, InferenceServer.receive_stream, ["g"], version),
        )
        assert received == dict.fromkeys(engine)
        assert await fleet.call(engine, InferenceServer.resume) == dict.fromkeys(engine)


def one(stack: EngineStack) -> tuple[Incarnation]:
    """The engine, as it is now."""
    return (stack.registry.engines[ENGINE].current,)


async def _in_flight(running: Running, count: int) -> list[asyncio.Task[Generation]]:
    """Long requests, once the engine generates for all of them. Where other processes take the cores they may end
    before that is seen; then others are sent.
    """
    server = SGLangServer(running.stack.http)
    async with asyncio.timeout(DEADLINE):
        while True:
            tasks = [asyncio.create_task(_generate(running, LONG, key=str(i))) for i in range(count)]
            for _ in range(100):
                if (await server.load(running.url, DEADLINE)).running == count:
                    return tasks
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _generate(running: Running, tokens: int, key: str = "a") -> Generation:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return await running.stack.client.generate(
        GenerateRequest(input_ids=np.array([5, 6, 7, 8], np.int32), sampling=sampling, routing_key=key)
    )


async def test_the_first_publication_opens_the_gate(running: Running) -> None:  # covers: C8
    waiting = asyncio.ensure_future(_generate(running, 32))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    trainer = Trainer(running.models[1])
    async with trainer.connected(running.stack):
        trainer.stage(0)
        await trainer.publish(running.stack, 0, "retract")
    [score] = (await running.stack.fleet.call(one(running.stack), InferenceServer.score, range(3, 40))).values()
    assert not isinstance(score, Exception)
    assert score.weight_version == "0"
    np.testing.assert_allclose(score.logprobs, reference_logprobs(running.models[1], range(3, 40)), atol=1e-4)
    assert not waiting.done()
    await running.stack.fleet.admit(one(running.stack), 0)
    generation = await waiting
    assert generation.engines == (ENGINE,)
    expected = reference_logprobs(running.models[1], [5, 6, 7, 8, *generation.output_ids.tolist()])[3:]
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("mode", "version"), [("abort", 1), ("retract", 2), ("in_place", 3)])
async def test_a_publication_meets_requests_in_flight(
    running: Running, mode: str, version: int
) -> None:  # covers: C8, M11
    trainer = Trainer(running.models[version % 2])
    async with trainer.connected(running.stack):
        trainer.stage(version)
        tasks = await _in_flight(running, 4)
        await trainer.publish(running.stack, version, mode)
    if mode != "abort":  # there answers are from before the weights changed, and count at once
        assert not any(task.done() for task in tasks)  # even finished answers wait for the commit
    await running.stack.fleet.admit(one(running.stack), version)
    for generation in await asyncio.gather(*tasks):
        versions = np.unique(generation.weight_versions).tolist()
        if mode == "abort":
            assert generation.finish_reason == "abort"
            assert versions == [version - 1]
        else:
            assert generation.finish_reason == "length"
            assert versions == [version - 1, version]
    fresh = await _generate(running, 16)
    assert {*fresh.weight_versions.tolist()} == {version}
    assert fresh.cached_tokens == 0  # the cache key carries the version, flushed or not
    expected = reference_logprobs(running.models[version % 2], [5, 6, 7, 8, *fresh.output_ids.tolist()])[3:]
    np.testing.assert_allclose(fresh.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("filters", "temperature"),
    [({}, 2.0), ({"top_p": 1e-6}, 1.0), ({"top_p": 1e-6}, 2.0), ({"min_p": 1.0}, 2.0), ({"top_k": 2}, 2.0)],
)
async def test_log_probs_are_of_the_distribution_before_filters(
    running: Running, filters: dict[str, float], temperature: float
) -> None:
    """Why --rollout-top-p and --rollout-top-k are refused: with top_p near 0 only one token can be sampled."""
    # covers: C12
    sampling = {"max_new_tokens": 8, "temperature": temperature, "ignore_eos": True, **filters}
    found = await running.stack.client.generate(
        GenerateRequest(input_ids=np.array([5, 6, 7, 8], np.int32), sampling=sampling, routing_key="a")
    )
    tokens = [5, 6, 7, 8, *found.output_ids.tolist()]
    np.testing.assert_allclose(
        found.logprobs, reference_logprobs(running.models[1], tokens, temperature)[3:], atol=1e-4
    )
    assert found.logprobs.max() < -1e-3


async def test_a_bad_request_keeps_the_engines_words(running: Running) -> None:  # covers: A5
    with pytest.raises(RequestRejectedError, match=r"400.*longer than the model's context length"):
        await running.stack.client.generate(
            GenerateRequest(input_ids=np.full(600, 5, np.int32), sampling={"max_new_tokens": 4}, routing_key="a")
        )


async def test_an_engine_gives_the_text_of_a_turn_as_the_client_decodes_it(running: Running) -> None:
    chat = ChatTemplate(load_tokenizer(running.models[0]), apply_chat_template=False)
    assert chat.decoder_id is not None
    prompt, sampling = np.array([5, 6, 7, 8], np.int32), {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}
    request = GenerateRequest(
        input_ids=prompt, sampling=sampling, routing_key="a", text_from=2, decoder_id=chat.decoder_id
    )
    turn = await take_turn(running.stack.client, request)
    assert turn.text == chat.decode_all(turn.output_ids.tolist())
    continued = await running.stack.client.generate(request)
    assert continued.text == chat.decode_all([7, 8, *continued.output_ids.tolist()])
    otherwise = await running.stack.client.generate(structs.replace(request, decoder_id=chat.decoder_id ^ 1))
    assert (otherwise.text, len(otherwise.output_ids)) == (None, 48)


async def test_the_router_passes_packed_answers_on(running: Running) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True, PACK: True}
    versions = partial(token_versions, dispatch_version=0, tokens_in_flight=1)
    async with Http().session as session, session.post(f"{running.stack.router.url}/generate", json=body) as response:
        answer = read_answer(await response.read(), response.content_type, running.url, versions)
        assert response.content_type == MEDIA_TYPE
    assert len(answer.output_ids) == 4


async def test_a_connection_of_the_router_may_be_idle(running: Running) -> None:  # covers: A3
    """SGLang would close it after 5 s, and fail a request that comes in that moment."""
    reader, writer = await asyncio.open_connection(*running.url.removeprefix("http://").split(":"))
    for seconds in (6.0, 0.0):
        writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(seconds)
    writer.close()


async def test_cancelled_requests_free_the_engine(running: Running) -> None:
    tasks = await _in_flight(running, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(60):
        while not await _idle(running):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_paused_engine_leaves_the_processor_to_others(running: Running) -> None:
    await running.note_processes()
    [waiting] = await _in_flight(running, 1)
    server, [scheduler] = SGLangServer(running.stack.http), _schedulers(running)
    await server.pause(running.url, "retract", DEADLINE)
    before = scheduler.cpu_times()
    await asyncio.sleep(1.0)
    after = scheduler.cpu_times()
    await server.resume(running.url, DEADLINE)
    assert len((await waiting).output_ids) == LONG
    assert after.user + after.system - before.user - before.system < 0.3


def _schedulers(running: Running) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["name"]) if each.pid in running.pids and "scheduler" in each.name()]


async def _idle(running: Running) -> bool:
    async with running.stack.http.session.get(running.url + "/v1/loads") as response:
        loads = (await response.json())["loads"]
    return all(load["num_running_reqs"] == 0 for load in loads)


async def test_a_dead_router_comes_back_with_its_engines(running: Running) -> None:
    await running.note_processes()
    registry = running.stack.registry
    os.kill(await running.stack.router.pid(), signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await registry.wait_until(lambda: not registry.router_up)
    generation = await _generate(running, 4)
    assert len(generation.output_ids) == 4


async def test_a_killed_engine_comes_back_joining_and_is_republished(running: Running) -> None:
    registry, stack = running.stack.registry, running.stack
    await running.note_processes()
    [interrupted] = await _in_flight(running, 1)
    victims = _schedulers(running)
    assert victims
    for victim in victims:
        victim.kill()
    async with asyncio.timeout(DEADLINE):
        await registry.wait_until(lambda: registry.engines[ENGINE].state is not EngineState.SERVING)
    assert not registry.may_dispatch()
    async with asyncio.timeout(200):
        await stack.supervisor.wait_for_joining()
    await running.note_processes()
    async with asyncio.timeout(DEADLINE):
        while await stack.router.workers():  # noqa: ASYNC110, it takes the dead one out a moment after it is told to
            await asyncio.sleep(0.05)
    trainer = Trainer(running.models[1])
    async with trainer.connected(stack):
        trainer.stage(3)
        await trainer.publish(stack, 3, "retract")
    await stack.fleet.admit(one(stack), 3)
    generation = await interrupted  # the request that was cut has been done again
    assert len(generation.output_ids) == LONG
    assert {*generation.weight_versions.tolist()} == {3}
    assert stack.stats().restarts == {ENGINE: 1}


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path, engine_imports: Path) -> None:
    (model := tmp_path / "nothing-here").mkdir()
    spec = served_spec(model, tmp_path, engine_imports)
    group = EngineGroup(engines=1, streams=True, launch=partial(ServerProcess, SGLANG, spec))
    arguments = EnginesArguments(), WeightsArguments()
    stack = EngineStack([group], *arguments, log_dir=tmp_path, network=LOCAL, calls=SGLangServer)
    with pytest.raises(EngineStartError, match=r"ended with status 1(.|\n)*nothing-here"):
        async with asyncio.timeout(120):
            await stack.start()
    assert not [each for each in psutil.process_iter() if str(tmp_path) in " ".join(command_line(each))]
