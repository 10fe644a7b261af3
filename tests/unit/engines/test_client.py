"""RouterClient against an in-process engine: what is retried, what is refused, what reaches the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from miles_async.arguments.routing import RouterShape
from miles_async.engines.client import ROUTING_KEY, RouterClient
from miles_async.engines.http import Http, http_error
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.sglang.answers import DECODER, PACK
from miles_async.engines.traffic import Traffic
from miles_async.errors import (
    ConfigurationError,
    RequestRejectedError,
    StalledError,
    TransientEngineError,
    VersionUnknownError,
)
from miles_async.types import GenerateRequest, Generation
from tests.fakes.clients import client_of, registry_of, serving
from tests.fakes.fake_engine import FakeEngine
from tests.json_dict import JsonDict

SAMPLING = {"max_new_tokens": 4, "temperature": 1.0}
EDGE_AT_ONE = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
ROUTERS = RouterShape(layers=1, topk=2, experts=64)


@dataclass
class Setup:
    engine: FakeEngine
    registry: EngineRegistry
    record: EngineRecord
    traffic: Traffic
    client: RouterClient

    def generate(
        self, input_ids: Sequence[int] = (5,), key: str = "a", experts_from: int = 0, **sampling: float
    ) -> Coroutine[Any, Any, Generation]:
        request = GenerateRequest(
            input_ids=np.array(input_ids, np.int32),
            sampling={**SAMPLING, **sampling},
            routing_key=key,
            experts_from=experts_from,
        )
        return self.client.generate(request)

    def change(self, **fields: object) -> None:
        """Change the record of the engine."""
        for name, value in fields.items():
            setattr(self.record, name, value)
        self.registry.notify()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine or the client tells nobody."""
    async with asyncio.timeout(50):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def setup(http: Http, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr("miles_async.engines.client._ABORT_SECONDS", 50.0)
    async with FakeEngine(weight_version="3") as engine:
        record, traffic = serving(engine.url), Traffic()
        registry = registry_of(record, version=3)
        client = client_of(http, registry, lambda: engine.url, traffic, retries=2)
        yield Setup(engine, registry, record, traffic, client)


@pytest.mark.parametrize("packs", [True, False])
async def test_an_answer_becomes_arrays_and_spans(setup: Setup, packs: bool) -> None:  # covers: M1
    setup.engine.packs = packs
    generation = await setup.generate([5, 6, 7])
    assert generation.output_ids.dtype == np.int32
    assert generation.output_ids.tolist() == [3, 4, 5, 6]
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.tolist() == [-0.5] * 4
    assert setup.engine.requests[0]["input_ids"] == [5, 6, 7]
    assert generation.weight_versions.tolist() == [3, 3, 3, 3]
    assert (generation.engines, generation.finish_reason, generation.prompt_tokens) == (("engine-0",), "length", 3)
    assert setup.traffic.completed == {"engine-0": 1}


@pytest.mark.parametrize("packs", [True, False])
async def test_experts_are_asked_for_where_they_are_replayed(setup: Setup, packs: bool) -> None:  # covers: M19
    setup.engine.packs = packs
    assert (await setup.generate([7, 8, 9])).routed_experts is None
    assert "return_routed_experts" not in setup.engine.requests[-1]
    setup.client._routers = ROUTERS
    generation = await setup.generate([7, 8, 9], experts_from=2)
    assert generation.routed_experts is not None
    assert generation.routed_experts.dtype == np.uint8
    assert generation.routed_experts.tolist() == [[token, token] for token in (9, 3, 4, 5)]


async def test_an_engine_that_tells_no_experts_ends_the_run(setup: Setup) -> None:  # covers: M19
    setup.client._routers, setup.engine.tells_experts = ROUTERS, False
    with pytest.raises(ConfigurationError, match="start this engine with --enable-return-routed-experts, or leave out"):
        await setup.generate()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (RouterShape(layers=2, topk=2, experts=64), "expected 2 experts in each of 2 layers for 4 tokens, found 8"),
        (RouterShape(layers=1, topk=2, experts=5), "expected experts from 0 to 4, found 3 to 5"),
    ],
)
async def test_experts_of_another_model_are_refused(setup: Setup, shape: RouterShape, message: str) -> None:
    # covers: M19
    setup.client._routers = shape
    with pytest.raises(TransientEngineError, match=message):
        await setup.generate()


async def test_a_request_that_was_aborted_before_it_began_has_no_experts(setup: Setup) -> None:  # covers: M19
    setup.client._routers = ROUTERS
    setup.engine.transform = lambda reply: {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_version": "3"},
    }
    assert (await setup.generate()).routed_experts is None


async def test_tokens_in_flight_count_as_old_as_what_sampled_them(setup: Setup) -> None:  # covers: C1, M1
    setup.engine.transform = lambda reply: reply["meta_info"].update(weight_versions=EDGE_AT_ONE) or reply
    setup.record.tokens_in_flight = 2  # speculative decoding
    generation = await setup.generate()
    assert generation.weight_versions.tolist() == [3, 3, 3, 4]


async def test_a_request_carries_routing_key_and_versioned_cache_key(setup: Setup) -> None:  # covers: C8, M13
    await setup.generate(key="group-7")
    assert setup.engine.headers[0][ROUTING_KEY] == "group-7"
    assert setup.engine.requests[0]["extra_key"] == "v3"
    assert setup.engine.requests[0]["return_logprob"] is True
    assert setup.engine.requests[0][PACK] is True
    assert DECODER not in setup.engine.requests[0]


async def test_the_engine_gives_the_text_of_the_turn_where_it_is_asked_for_and_can(setup: Setup) -> None:
    request = GenerateRequest(
        input_ids=np.array([5, 6, 7], np.int32), sampling=SAMPLING, routing_key="a", text_from=1, decoder_id=7
    )
    assert (await setup.client.generate(request)).text == "<6><7><3><4><5><6>"
    assert (await setup.generate()).text is None
    setup.engine.decoder = 8
    assert (await setup.client.generate(request)).text is None
    setup.engine.packs = False  # an external one
    assert (await setup.client.generate(request)).text is None


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (500, "call_upstream_connection_failed", TransientEngineError),
        (503, "no_available_workers", TransientEngineError),
        (408, "no request came", TransientEngineError),
        (429, "slow down", TransientEngineError),
        (404, '{"code":"model_not_found"}', TransientEngineError),
        (404, "Not Found", RequestRejectedError),
        (400, "input is too long", RequestRejectedError),
        (413, "body too large", RequestRejectedError),
    ],
)
def test_which_answers_are_worth_another_try(status: int, text: str, expected: type) -> None:  # covers: A3, A5
    error = http_error(status, text)
    assert type(error) is expected
    assert text in str(error)  # the upstream's own words
    assert str(status) in str(error)


async def test_transient_errors_are_retried_with_a_fresh_id(setup: Setup) -> None:  # covers: A3
    answers = iter([web.Response(status=503), web.Response(status=500, text="call_upstream_x"), None])
    setup.engine.respond = lambda body: next(answers)
    await setup.generate()
    assert len({body["rid"] for body in setup.engine.requests}) == 3


async def test_further_tries_go_straight_to_one_serving_engine_after_the_other(setup: Setup) -> None:  # covers: A3, C8
    """Whatever the router does: here it sends everything to an engine that is out."""
    setup.record.state = EngineState.FENCED
    async with FakeEngine(weight_version="3", name_worker=False) as first, FakeEngine(name_worker=False) as second:
        for engine_id, engine in {"engine-1": first, "engine-2": second}.items():
            setup.registry.engines[engine_id] = serving(engine.url, engine_id)
        setup.registry.notify()
        second.respond = lambda body: web.Response(status=503)
        generations = [await setup.generate(key=str(key)) for key in range(8)]
    assert {generation.engines[0] for generation in generations} == {"engine-1"}
    assert len(setup.engine.requests) == len(first.requests) == 8


async def test_retries_are_bounded(setup: Setup) -> None:  # covers: A3
    setup.engine.respond = lambda body: web.Response(status=503, text="overloaded")
    with capture_logs() as log_output, pytest.raises(TransientEngineError, match="503: overloaded"):
        await setup.generate()
    assert len(setup.engine.requests) == setup.traffic.failed == 3
    assert [entry["event"] for entry in log_output] == ["requests fail and are retried"]  # not of every request


async def test_tries_come_less_and_less_often_up_to_ten_seconds(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: A3
    waited, plain = [], asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds >= 1.0:
            waited.append(seconds)
        await plain(0 if seconds >= 1.0 else seconds)

    def uniform(low: float, high: float) -> float:  # requests that fail at once do not all come back at once
        assert (low, high) == (1.0, 2.0)
        return 1.5

    monkeypatch.setattr("miles_async.engines.client.asyncio.sleep", sleep)
    monkeypatch.setattr("miles_async.engines.client.random.uniform", uniform)
    setup.client._retries, setup.client._backoff_seconds = 5, 1.0
    setup.engine.respond = lambda body: web.Response(status=503)
    with pytest.raises(TransientEngineError, match="503"):
        await setup.generate()
    assert waited == [1.5, 3.0, 6.0, 12.0, 15.0]


async def test_a_rejected_request_is_not_retried(setup: Setup) -> None:  # covers: A3, A5
    setup.engine.respond = lambda body: web.Response(status=400, text="input is longer than the context")
    with pytest.raises(RequestRejectedError, match="longer than the context"):
        await setup.generate()
    assert len(setup.engine.requests) == 1


async def test_a_cut_answer_is_retried(setup: Setup) -> None:
    bodies = iter([web.Response(text='{"output_ids": [1, 2'), None])

    def respond(body: dict) -> web.Response | None:
        response = next(bodies)
        if response is not None:
            response.headers["x-smg-routed-worker-id"] = setup.engine.url
        return response

    setup.engine.respond = respond
    generation = await setup.generate()
    assert len(generation.output_ids) == 4


@pytest.mark.parametrize("entries", [[[-0.5, 3, None]], [[-0.5, 9, None]] * 4, [[None, 3 + i, None] for i in range(4)]])
async def test_log_probs_must_belong_to_the_tokens(setup: Setup, entries: list) -> None:  # covers: C12
    def spoil(reply: dict) -> dict:
        reply["meta_info"]["output_token_logprobs"] = entries
        return reply

    setup.engine.transform = spoil
    with pytest.raises(TransientEngineError, match="log-prob"):
        await setup.generate()


@pytest.mark.parametrize(
    ("token", "message"),
    [(64, r"token ids from 0 to 63, those of config\.json, found 3 to 64"), (-1, "token ids from 0 to 63.*found -1")],
)
@pytest.mark.parametrize("packs", [True, False])
async def test_tokens_are_of_the_models_vocabulary(setup: Setup, token: int, message: str, packs: bool) -> None:
    # covers: A3, C12
    def spoil(reply: dict) -> dict:
        reply["output_ids"][-1] = reply["meta_info"]["output_token_logprobs"][-1][1] = token
        return reply

    setup.engine.packs = packs
    setup.engine.transform = spoil
    setup.client._vocabulary = 64
    with pytest.raises(TransientEngineError, match=message):
        await setup.generate()
    assert len(setup.engine.requests) == len(setup.record.wrong_answers) == 3
    assert setup.record.reason.startswith("gave 3 wrong answers within 3600 s; the last: ")


@pytest.mark.parametrize("packs", [True, False])
async def test_no_log_prob_is_above_0(setup: Setup, packs: bool) -> None:  # covers: A3, C12
    def spoil(reply: JsonDict) -> JsonDict:
        reply["meta_info"]["output_token_logprobs"][1][0] = 3.0
        return reply

    setup.engine.packs, setup.engine.transform = packs, spoil
    with pytest.raises(TransientEngineError, match="expected log-probs of at most 0, found 3"):
        await setup.generate()
    assert setup.record.reason.startswith("gave 3 wrong answers within 3600 s; the last: ")


async def test_an_answer_has_no_more_tokens_than_were_asked_for(setup: Setup) -> None:  # covers: A3, C12
    def lengthen(reply: dict) -> dict:
        reply["output_ids"].append(9)
        reply["meta_info"]["completion_tokens"] += 1
        reply["meta_info"]["output_token_logprobs"].append([-0.5, 9, None])
        reply["meta_info"]["weight_versions"][-1]["end"] += 1
        return reply

    setup.engine.transform = lengthen
    with pytest.raises(TransientEngineError, match=r"expected at most 4 tokens \(max_new_tokens\), found 5"):
        await setup.generate()


async def test_an_answer_that_ends_without_a_token_is_wrong(setup: Setup) -> None:  # covers: A3
    def empty(reply: JsonDict) -> JsonDict:
        reply["output_ids"] = []
        reply["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": []}
        reply["meta_info"]["finish_reason"] = {"type": "stop"}
        return reply

    setup.engine.transform = empty
    with pytest.raises(TransientEngineError, match="expected a token that ends the answer, found none"):
        await setup.generate()
    assert setup.record.reason.startswith("gave 3 wrong answers")


PROMPT = (11, 12, 13)


def echoing(logprob: float) -> Callable[[JsonDict], JsonDict]:
    """An engine that puts the prompt, with ``logprob`` per token, in front of the first token that it sampled."""

    def spoil(reply: JsonDict) -> JsonDict:
        output_ids = reply["output_ids"] = [*PROMPT, reply["output_ids"][0]]
        entries = [[logprob if token in PROMPT else -0.5, token, None] for token in output_ids]
        reply["meta_info"] |= {"output_token_logprobs": entries, "completion_tokens": len(output_ids)}
        return reply

    return spoil


@pytest.mark.parametrize("packs", [True, False])
async def test_an_answer_that_begins_with_its_prompt_is_wrong(setup: Setup, packs: bool) -> None:  # covers: A3, C12
    setup.engine.packs = packs
    setup.engine.transform = echoing(-12.0)  # as the model scores its prompt: e^-36 to have sampled it
    with pytest.raises(TransientEngineError, match=r"begins with its own input \(3 tokens\)"):
        await setup.generate(PROMPT)
    assert setup.record.reason.startswith("gave 3 wrong answers within 3600 s; the last: ")


@pytest.mark.parametrize(("logprob", "sampling"), [(-0.01, {}), (-12.0, {"temperature": 0.0}), (-12.0, {"top_p": 0.9})])
async def test_a_model_may_copy_its_prompt(setup: Setup, logprob: float, sampling: dict[str, float]) -> None:
    """Log-probs say that it was likely to, or nothing where tokens are sampled from a part of the distribution."""
    setup.engine.transform = echoing(logprob)
    generation = await setup.generate(PROMPT, **sampling)
    assert generation.output_ids[:3].tolist() == [11, 12, 13]
    assert setup.record.wrong_answers == ()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"completion_tokens": 7}, r"expected 7 output tokens \(completion_tokens\), found 4"),
        ({"prompt_tokens": 2}, "expected an answer to 3 tokens, found one to 2"),
        ({"prompt_tokens": 4}, "expected an answer to 3 tokens, found one to 4"),
    ],
)
async def test_counts_of_an_answer_are_those_of_its_request(
    setup: Setup, counts: dict[str, int], message: str, packs: bool
) -> None:  # covers: A3, C12
    """Of a prompt that was cut, or got another token, and of an answer of which a part is missing."""

    def spoil(reply: JsonDict) -> JsonDict:
        reply["meta_info"] |= counts
        return reply

    setup.engine.packs, setup.engine.transform = packs, spoil
    with pytest.raises(TransientEngineError, match=message):
        await setup.generate(PROMPT)
    assert len(setup.record.wrong_answers) == 3


async def test_an_answer_without_counts_is_read(setup: Setup) -> None:
    """Other versions of a server may leave them out."""

    def spoil(reply: JsonDict) -> JsonDict:
        del reply["meta_info"]["prompt_tokens"], reply["meta_info"]["completion_tokens"]
        return reply

    setup.engine.packs, setup.engine.transform = False, spoil
    assert len((await setup.generate(PROMPT)).output_ids) == 4


async def test_an_engine_without_published_weights_is_an_error(setup: Setup) -> None:  # covers: M1
    setup.engine.weight_version = "default"
    with pytest.raises(VersionUnknownError):
        await setup.generate()


async def test_an_answer_without_spans_counts_as_old_as_its_dispatch(setup: Setup) -> None:  # covers: M1
    def old_server(reply: dict) -> dict:
        del reply["meta_info"]["weight_versions"]
        reply["meta_info"]["weight_version"] = "4"
        return reply

    setup.engine.transform = old_server
    generation = await setup.generate()
    assert generation.weight_versions.tolist() == [3, 3, 3, 3]


async def test_requests_wait_while_engines_are_paused_or_unverified(setup: Setup) -> None:  # covers: C8
    setup.change(paused=True)
    async with asyncio.TaskGroup() as scope:
        task = scope.create_task(setup.generate())
        await asyncio.sleep(0.05)
        assert setup.engine.requests == []
        setup.change(paused=False, verified=False)
        await asyncio.sleep(0.05)
        assert setup.engine.requests == []
        setup.registry.version, setup.engine.weight_version = 4, "4"
        setup.change(verified=True)
    assert setup.engine.requests[0]["extra_key"] == "v4"
    assert len(task.result().output_ids) == 4


async def test_waiting_for_engines_has_a_deadline_that_names_them(setup: Setup) -> None:  # covers: C10
    setup.change(state=EngineState.STARTING)
    setup.client._gate_timeout = 0.05
    with pytest.raises(StalledError, match="engine-0 starting; router up"):
        await setup.generate()


async def test_an_answer_of_a_fenced_engine_is_not_used(setup: Setup) -> None:  # covers: C8
    setup.engine.token_seconds = 0.05
    async with asyncio.TaskGroup() as scope:
        task = scope.create_task(setup.generate())
        await until(lambda: len(setup.engine.requests) == 1)
        setup.change(verified=False)  # new weights arrived, the canary has not run yet
        await until(lambda: setup.traffic.in_flight == 0)
        assert not task.done()  # answered, but held back
        setup.change(state=EngineState.FENCED)  # the canary disagreed
        await until(lambda: setup.traffic.failed == 1)
        setup.change(state=EngineState.SERVING, verified=True)
    assert len(setup.engine.requests) == 2
    assert setup.traffic.failed == 1


async def test_an_engine_on_trial_gets_requests_and_its_answers_wait(setup: Setup) -> None:  # covers: C8
    setup.engine.weight_version = "4"
    setup.change(verified=False, on_trial=True, version=4)
    async with asyncio.TaskGroup() as scope:
        task = scope.create_task(setup.generate())
        await until(lambda: len(setup.engine.requests) == 1 and setup.traffic.in_flight == 0)
        await asyncio.sleep(0.05)
        assert not task.done()
        setup.change(verified=True, on_trial=False)
    assert setup.engine.requests[0]["extra_key"] == "v4"
    assert task.result().weight_versions.tolist() == [4, 4, 4, 4]
    assert setup.traffic.failed == 0


async def test_answers_of_an_engine_whose_trial_failed_are_discarded(setup: Setup) -> None:  # covers: C8
    setup.change(verified=False, on_trial=True, version=4)
    async with asyncio.TaskGroup() as scope:
        task = scope.create_task(setup.generate())
        await until(lambda: len(setup.engine.requests) == 1 and setup.traffic.in_flight == 0)
        setup.change(state=EngineState.FENCED, on_trial=False)  # the canary disagreed
        await until(lambda: setup.traffic.failed == 1)
        assert not task.done()
        setup.engine.weight_version = "4"
        setup.change(state=EngineState.SERVING, verified=True)
    assert len(setup.engine.requests) == 2
    assert task.result().weight_versions.tolist() == [4, 4, 4, 4]


async def test_an_answer_of_older_weights_than_those_visible_at_dispatch_is_not_used(setup: Setup) -> None:
    """An engine was out, got the request all the same, and is back, verified, when it answers."""
    # covers: C8
    replies = []

    def begun_before_its_repair(reply: JsonDict) -> JsonDict:
        if not replies:
            reply["meta_info"]["weight_versions"] = [
                {"version": "2", "start": 0, "end": 2},
                {"version": "3", "start": 2, "end": 4},
            ]
        replies.append(reply)
        return reply

    setup.engine.transform = begun_before_its_repair
    generation = await setup.generate()
    assert (len(replies), setup.traffic.failed) == (2, 1)
    assert generation.weight_versions.tolist() == [3, 3, 3, 3]


async def test_an_answer_waits_for_its_own_engine_only(setup: Setup) -> None:  # covers: C8
    other = serving("http://other", "engine-1", verified=False, paused=True, version=3)
    setup.registry.engines["engine-1"] = other  # in the middle of a rolling publication
    setup.change(version=4)
    await setup.generate()
    assert setup.engine.requests[0]["extra_key"] == "v3", "version 3 might have served it"
    setup.record.paused, other.paused, other.verified = True, False, True
    setup.registry.notify()
    await setup.generate()  # whoever sent it to a paused engine: it waits there


@pytest.mark.parametrize("keep", [True, False])
async def test_tokens_from_before_an_abort_are_kept_or_generated_again(setup: Setup, keep: bool) -> None:  # covers: P4
    setup.client._keep_aborted = keep
    aborted = []

    def abort_first(reply: dict) -> dict:
        if not aborted:
            aborted.append(reply["meta_info"]["id"])
            reply["meta_info"]["finish_reason"] = {"type": "abort"}
        return reply

    setup.engine.transform = abort_first
    generation = await setup.generate()
    assert generation.finish_reason == ("abort" if keep else "length")
    assert [request["rid"] for request in setup.engine.requests[:1]] == aborted
    assert len(setup.engine.requests) == (1 if keep else 2)


async def test_a_request_that_is_aborted_before_it_began_has_no_tokens(setup: Setup) -> None:  # covers: P4
    def abort_in_the_queue(reply: dict) -> dict:  # what SGLang's tokenizer manager makes of it
        kept = {name: reply["meta_info"][name] for name in ("id", "weight_version")}
        finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
        return {"text": "", "output_ids": [], "meta_info": kept | {"finish_reason": finish_reason}}

    setup.engine.transform = abort_in_the_queue
    generation = await setup.generate()
    assert (generation.finish_reason, len(generation.output_ids), len(generation.weight_versions)) == ("abort", 0, 0)
    assert len(setup.engine.requests) == 1, "that is no failure, and nothing to try again"


async def test_answers_that_come_at_once_are_read_a_few_per_turn_of_the_loop(setup: Setup) -> None:
    """As when a publication aborts all requests."""
    plain, gate = setup.client._post, asyncio.Event()
    arrived: list[object] = []

    async def held(*request: Any) -> Any:
        answer = await plain(*request)
        arrived.append(answer)
        await gate.wait()
        return answer

    setup.client._post = held
    async with asyncio.TaskGroup() as scope:
        for _ in range(20):
            scope.create_task(setup.generate())
        await until(lambda: len(arrived) == 20)
        gate.set()
        done = [setup.traffic.completed["engine-0"]]
        while done[-1] < 20:
            await asyncio.sleep(0)
            done.append(setup.traffic.completed["engine-0"])
    assert max(np.diff(done)) == 3


async def test_cancellation_aborts_the_request_at_the_engine(setup: Setup) -> None:
    setup.engine.token_seconds = 10.0
    task = asyncio.ensure_future(setup.generate())
    await until(lambda: len(setup.engine.requests) == 1)
    assert setup.traffic.in_flight == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.engine.aborted_ids == [setup.engine.requests[0]["rid"]]
    assert setup.traffic.in_flight == 0


class CutConnection(web.Response):
    """Ends the connection in place of an answer."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        assert request.transport is not None
        request.transport.abort()
        return await super().prepare(request)


async def test_a_request_whose_connection_broke_is_aborted_at_the_engine(setup: Setup) -> None:
    """The engine may know nothing of it, and go on for nobody."""
    setup.engine.respond = lambda body: CutConnection() if len(setup.engine.requests) == 1 else None
    await setup.generate()
    first, _ = setup.engine.requests
    assert setup.engine.aborted_ids == [first["rid"]]


async def test_a_thousand_cancelled_requests_are_not_a_thousand_aborts(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:  # covers: C10
    monkeypatch.setattr("miles_async.engines.client._ABORT_CALLS", 2)
    setup.engine.token_seconds = 10.0
    tasks = [asyncio.ensure_future(setup.generate(key=f"{i}")) for i in range(5)]
    await until(lambda: len(setup.engine.requests) == 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    assert len(setup.engine.aborted_ids) == 2
    last = asyncio.ensure_future(setup.generate())
    await until(lambda: len(setup.engine.requests) == 6)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    assert len(setup.engine.aborted_ids) == 3  # those were over


async def test_a_timed_out_request_is_aborted_and_retried(setup: Setup) -> None:  # covers: A3
    setup.engine.token_seconds = 10.0
    setup.client._request_timeout = 0.05
    with pytest.raises(TransientEngineError, match="--request-timeout"):
        await setup.generate()
    assert len(setup.engine.aborted_ids) == 3
    assert {body["rid"] for body in setup.engine.requests} <= {*setup.engine.aborted_ids}  # some may not have arrived


async def test_an_abort_is_a_partial_answer(setup: Setup) -> None:  # covers: R2
    setup.engine.token_seconds = 0.02
    async with asyncio.TaskGroup() as scope:
        task = scope.create_task(setup.generate(max_new_tokens=500))
        await until(lambda: len(setup.engine.requests) == 1)
        await asyncio.sleep(0.15)
        await setup.client._server.abort_all(setup.engine.url, 1.0)
    assert task.result().finish_reason == "abort"
    assert 0 < len(task.result().output_ids) < 500


def test_busy_seconds_count_time_with_any_request_in_flight() -> None:
    now = 0.0
    traffic = Traffic(clock=lambda: now)
    with traffic.request("a"):
        now = 1.0
        with traffic.request("b"):
            now = 3.0
            assert traffic.in_flight == 2
            assert traffic.oldest_seconds() == 3.0
    now = 10.0
    assert traffic.busy_seconds() == 3.0
    with traffic.request("c"):
        now = 12.0
        assert traffic.busy_seconds() == 5.0
