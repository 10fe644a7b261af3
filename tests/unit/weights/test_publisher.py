"""Publication is all-or-nothing (C8), seen as the order of calls that reach trainer and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from miles_async.arguments import WeightsArguments
from miles_async.errors import EngineError, EngineTimeoutError, PublicationError
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.types import HeldPart, HeldWeights, Incarnation, StagedWeights, TensorShare
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.update import PublicationState
from tests.fakes.fake_sides import DIGEST, FakeBroadcaster, FakeFleet, FakeTrainer, InProcess, Results, ids, publish
from tests.fakes.publishers import publisher_of


def make(
    fleet: FakeFleet,
    engines_timeout: float = 10.0,
    senders: int = 1,
    trainer: FakeTrainer | None = None,
    apart: FakeFleet | None = None,
    **flags: object,
) -> WeightPublisher:
    """``apart``: engines that only evaluate."""
    trainer, arguments = trainer or FakeTrainer(fleet.events, senders=senders), WeightsArguments(**flags)
    settings = {"engines_timeout": engines_timeout, "poll_seconds": 0.01}
    return publisher_of(trainer, fleet, arguments, apart=apart, **settings)


async def test_order_of_a_publication() -> None:
    # covers: C8, R4
    fleet = FakeFleet([])
    publication = await publish(make(fleet), 0)
    assert fleet.events == [
        "copy 0", "stage 0", "probe", "abort_all", "open 2", "connect", "pause retract", "flush",
        "receive all", "announce and send 0", "digests", "resume", "trial 0", "score", "admit 0",
    ]  # fmt: skip
    assert publication.engines == ("engine-0",)
    assert publication.fenced == ()
    assert fleet.serving == ["engine-0"]


async def test_senders_send_at_the_same_time_each_in_a_group_of_its_own() -> None:
    # covers: C8
    fleet = FakeFleet([])
    publisher = make(fleet, senders=2)
    await publish(publisher, 0)
    assert fleet.events[4:] == [
        "open 2 by 0", "connect", "open 2 by 1", "connect", "pause retract", "flush",
        "receive all", "announce and send 0 by 0", "announce and send 0 by 1",
        "digests", "resume", "trial 0", "score", "admit 0",
    ]  # fmt: skip
    assert len(fleet.groups) == 2
    assert fleet.sent == [(Incarnation("engine-0", 0),)]
    await publisher.close()
    assert not fleet.groups


async def test_process_group_ranks_follow_tensor_parallel_sizes() -> None:
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    fleet.ranks = 2
    await publish(make(fleet), 0)
    assert "open 5" in fleet.events
    assert fleet.first_ranks == [1, 3]


async def test_engines_that_are_not_ours_are_told_of_every_bucket_and_so_are_those_beside_them() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    fleet.bucketwise = frozenset({"engine-1"})
    await publish(make(fleet, senders=2), 0)
    told = [event for event in fleet.events if event.split()[0] in ("begin", "receive", "end")]
    assert told == ["begin", "receive t0", "receive t1", "end"]
    assert {"send 0 by 0", "send 0 by 1"} <= set(fleet.events), "nothing is announced"


async def test_rolling_brings_engines_to_the_weights_a_few_at_a_time() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    publisher = make(fleet, publish_order="rolling", rolling_engines=2)
    await publish(publisher, 0)
    assert "open 4" in fleet.events, "nobody generates yet: all at once"
    fleet.joining.append("engine-3")
    portions, plain = [], fleet.pause

    async def watch(engines: Sequence[Incarnation], mode: str) -> Results:
        portions.append(tuple(map(str, engines)))
        return await plain(engines, mode)

    fleet.pause = watch  # type: ignore[method-assign]
    for version in (1, 2):
        fleet.events.clear()
        publication = await publish(publisher, version)
        assert publication.engines == tuple(e for portion in portions for e in portion)
        assert fleet.events.count(f"stage {version}") == 1
        assert not fleet.paused
        portions, last = [], portions
    assert last == [("engine-0", "engine-1"), ("engine-2", "engine-3")]
    fleet.events.clear()
    await publish(publisher, 3)
    assert "connect" not in fleet.events, "a process group per portion, kept"


async def test_rolling_loses_only_who_fails() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    publisher = make(fleet, publish_order="rolling")
    await publish(publisher, 0)
    fleet.logprobs["engine-1"] = (-9.0, -9.0)
    publication = await publish(publisher, 1)
    assert (publication.engines, publication.fenced) == (("engine-0", "engine-2"), ("engine-1",))


async def test_in_place_flushes_who_joins_and_nobody_else() -> None:
    # covers: M11
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    publisher = make(fleet, pause_generation_mode="in_place")
    await publish(publisher, 0)
    assert "flush" in fleet.events, "a server that was attached may hold what others left in it"
    fleet.events.clear()
    await publish(publisher, 1)
    assert "pause in_place" in fleet.events
    assert "flush" not in fleet.events


async def test_group_is_kept_while_engines_stay_the_same() -> None:
    fleet = FakeFleet([])
    publisher = make(fleet)
    await publish(publisher, 0)
    await publish(publisher, 1)
    assert fleet.events.count("connect") == 1
    fleet.joining.append("engine-1")
    await publish(publisher, 2)
    assert fleet.events.count("connect") == 2
    assert "open 3" in fleet.events


@pytest.mark.parametrize("publish_order", ["all", "rolling"])
async def test_groups_of_engines_that_are_gone_are_left(publish_order: str) -> None:
    """A group keeps its sender's port, so a run would use up --port-range."""
    # covers: C8
    fleet = FakeFleet([])
    publisher = make(fleet, publish_order=publish_order)
    for version in range(4):
        await publish(publisher, version)
        assert list(fleet.groups.values()) == [{"engine-0"}]
        fleet.restart("engine-0")


async def test_rolling_leaves_the_group_of_an_engine_that_was_scaled_away_and_no_other() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    publisher = make(fleet, publish_order="rolling")
    for version in (0, 1):
        await publish(publisher, version)
    assert list(fleet.groups.values()) == [{"engine-0"}, {"engine-1"}, {"engine-2"}]
    fleet.serving.remove("engine-1")
    fleet.events.clear()
    await publish(publisher, 2)
    assert list(fleet.groups.values()) == [{"engine-0"}, {"engine-2"}]
    assert "connect" not in fleet.events


@pytest.mark.parametrize(
    "step",
    [
        "probe",
        "connect",
        "pause retract",
        "flush",
        "receive all",
        "begin",
        "receive t0",
        "receive t1",
        "end",
        "digests",
        "resume",
        "score",
        "admit 3",
    ],
)
@pytest.mark.parametrize("senders", [1, 2])
async def test_engine_that_fails_is_fenced_and_the_others_get_everything(step: str, senders: int) -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    if step in ("begin", "receive t0", "receive t1", "end"):
        fleet.bucketwise = frozenset({"engine-0", "engine-1", "engine-2"})
    fleet.faults[step] = {"engine-1"}
    publication = await publish(make(fleet, senders=senders), 3)
    for engine in fleet.serving:
        assert sum(engine in members for members in fleet.groups.values()) == senders
    assert set(publication.engines) == {"engine-0", "engine-2"}
    assert fleet.fenced == ["engine-1"]
    assert fleet.serving == ["engine-0", "engine-2"]
    assert not fleet.paused & {"engine-0", "engine-2"}
    assert not fleet.sessions
    for engine in ("engine-0", "engine-2"):
        assert fleet.complete[engine] == ["t0", "t1"], "a part of the weights is not enough"


async def test_a_group_that_broke_by_itself_costs_no_engine() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    plain, broken = fleet.receive_stream, []

    async def break_once(engines: Sequence[Incarnation], *rest: object) -> Results:
        if not broken:
            broken.append(True)
            return {engine: EngineError("connection closed by peer") for engine in engines}
        return await plain(engines, *rest)

    fleet.receive_stream = break_once  # type: ignore[method-assign]
    publication = await publish(make(fleet), 3)
    assert set(publication.engines) == {"engine-0", "engine-1"}
    assert publication.fenced == ()


async def test_engine_that_hangs_costs_its_own_deadline_not_the_run() -> None:
    # covers: C8, C10
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    plain = fleet.receive_stream

    async def hang(engines: Sequence[Incarnation], *rest: object) -> Results:
        if "engine-1" in ids(engines):
            await asyncio.sleep(0.05)  # the fleet's own deadline
            return {engine: EngineTimeoutError("no answer within 0.05 s") for engine in engines}
        return await plain(engines, *rest)

    fleet.receive_stream = hang  # type: ignore[method-assign]
    publication = await publish(make(fleet, publication_timeout=5.0), 3)
    assert publication.engines == ("engine-0",)
    assert fleet.fenced == ["engine-1"]


@pytest.mark.parametrize("step", ["join_group", "receive_stream"])
async def test_engines_that_wait_for_one_that_died_are_not_to_blame(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear nothing from it, and time out."""
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    plain = getattr(fleet, step)

    async def wait_for_the_dead(engines: Sequence[Incarnation], *rest: object) -> Results:
        if "engine-1" not in ids(engines):
            return await plain(engines, *rest)
        fleet.faults["probe"] = {"engine-1"}
        return {
            engine: EngineError("connection refused") if engine.engine == "engine-1" else EngineTimeoutError("silent")
            for engine in engines
        }

    monkeypatch.setattr(fleet, step, wait_for_the_dead)
    publication = await publish(make(fleet, publication_timeout=5.0), 3)
    assert set(publication.engines) == {"engine-0", "engine-2"}
    assert fleet.fenced == ["engine-1"]


async def test_engine_that_answers_with_the_old_version_is_fenced() -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    fleet.labels["engine-1"] = "4"
    publication = await publish(make(fleet), 5)
    assert publication.fenced == ("engine-1",)


@pytest.mark.parametrize("logprobs", [(-1.0, -2.1), (-1.0, float("nan")), (-1.0,)])
async def test_canary_that_disagrees_fences(logprobs: tuple[float, ...]) -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    fleet.logprobs["engine-0"] = logprobs
    publication = await publish(make(fleet), 1)
    assert publication.fenced == ("engine-0",)
    assert fleet.serving == ["engine-1"]


async def test_an_engine_that_joins_loses_the_requests_that_it_has() -> None:
    # covers: C8
    fleet, aborted = FakeFleet([], serving=("engine-0",), joining=("engine-1",)), []

    async def abort_all(engines: Any) -> Any:
        assert "pause retract" not in fleet.events
        aborted.extend(ids(engines))
        return dict.fromkeys(engines)

    fleet.abort_all = abort_all  # type: ignore[attr-defined]
    await publish(make(fleet), 1)
    assert aborted == ["engine-1"], "an external one may have begun them with wrong weights"


async def test_the_pause_ends_before_the_canary_whose_duration_is_reported_apart() -> None:
    # covers: C8
    fleet = FakeFleet([])
    score = fleet.score

    async def slow(engines: Sequence[Incarnation], tokens: Sequence[int]) -> Results:
        scored = await score(engines, tokens)
        await asyncio.sleep(0.2)
        assert fleet.events[-2:] == ["trial 0", "score"], "requests go out while it is scored"
        return scored

    fleet.score = slow  # type: ignore[method-assign]
    publication = await publish(make(fleet), 0)
    assert publication.pause_seconds < 0.2 <= publication.step_seconds["canary"]
    assert fleet.events[-1] == "admit 0"


async def test_without_any_engine_it_says_so_at_the_deadline_and_why() -> None:
    # covers: C10
    fleet = FakeFleet([], joining=("engine-0",))
    fleet.faults["pause retract"] = {"engine-0"}
    with pytest.raises(PublicationError, match=r"waited 0.05 s for an engine.*engine-0 was lost: pausing.*refused"):
        await publish(make(fleet, engines_timeout=0.05), 2)


async def test_update_that_takes_too_long_says_where_it_was() -> None:
    # covers: C10
    fleet = FakeFleet([])

    async def hang(engines: Sequence[Incarnation]) -> None:
        await asyncio.sleep(60)

    fleet.flush_cache = hang  # type: ignore[method-assign]
    with pytest.raises(PublicationError, match=r"version 2.*--publication-timeout.*pausing"):
        await publish(make(fleet, publication_timeout=0.05), 2)
    assert not fleet.paused, "engines go on whatever happens"


async def test_repair_touches_joining_engines_only_and_uses_the_served_version() -> None:
    fleet = FakeFleet([])
    publisher = make(fleet)
    await publish(publisher, 7)
    fleet.events.clear()
    fleet.joining = ["engine-1"]
    assert await publisher.repair() == ("engine-1",)
    assert not {"copy 7", "stage 7"} & set(fleet.events)
    assert fleet.versions == {"engine-0": 7, "engine-1": 7}
    assert fleet.serving == ["engine-0", "engine-1"]


async def test_an_engine_that_the_router_does_not_take_in_time_costs_no_other_engine_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miles_async.weights.publisher.ADMISSION_SECONDS", 0.05)
    fleet = FakeFleet([])
    publisher = make(fleet)
    await publish(publisher, 7)
    fleet.joining = ["engine-1", "engine-2"]
    admit = fleet.admit

    async def slowly(engines: Sequence[Incarnation], version: int) -> Results:
        await admit([engine for engine in engines if engine.engine == "engine-1"], version)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(fleet, "admit", slowly)
    assert await publisher.repair() == ("engine-1",)
    assert fleet.fenced == ["engine-2"]
    assert fleet.serving == ["engine-0", "engine-1"]


async def test_no_process_group_is_left_at_the_end_not_even_of_a_repair_under_way() -> None:
    # covers: C10
    fleet, apart = FakeFleet([]), FakeFleet([])
    publisher, begun = make(fleet, apart=apart), asyncio.Event()
    await publish(publisher, 7)
    async with publisher.evaluating():
        pass
    fleet.joining = ["engine-1"]

    async def hang(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    fleet.receive_stream = hang  # type: ignore[method-assign, assignment]
    repair = asyncio.ensure_future(publisher.repair())
    await begun.wait()
    repair.cancel()
    with pytest.raises(asyncio.CancelledError):
        await repair
    assert sorted(map(sorted, fleet.groups.values())) == [["engine-0"], ["engine-1"]]
    assert apart.groups
    await publisher.close()
    assert not fleet.groups
    assert not apart.groups


async def until_none_joins(fleet: FakeFleet) -> None:
    async with asyncio.timeout(30):
        while fleet.joining:  # noqa: ASYNC110, the fake tells nobody
            await asyncio.sleep(0.05)


async def test_an_engine_that_joins_an_evaluation_gets_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C8, A9
    fleet, apart, pins = FakeFleet([]), FakeFleet([], joining=("eval-0",)), []
    monkeypatch.setattr(FakeBroadcaster, "pin", lambda sender, version: pins.append(version))
    monkeypatch.setattr(FakeBroadcaster, "unpin", lambda sender, version: pins.remove(version))
    publisher = make(fleet, apart=apart)
    await publish(publisher, 7)
    async with publisher.evaluating():
        assert pins == [7]
        assert apart.serving == ["eval-0"]
        await publish(publisher, 8)
        apart.restart("eval-0")
        apart.joining.append("eval-1")  # by `miles-async scale`
        await until_none_joins(apart)
        assert apart.versions == {"eval-0": 7, "eval-1": 7}
    assert not pins
    apart.restart("eval-0")
    await publish(publisher, 9)
    assert apart.joining == ["eval-0"], "until the next evaluation"
    assert fleet.versions == {"engine-0": 9}


async def test_an_evaluation_outlives_a_repair_that_fails() -> None:
    # covers: A9
    fleet, apart = FakeFleet([]), FakeFleet([], joining=("eval-0", "eval-1"))
    publisher, plain = make(fleet, apart=apart), apart.receive_stream
    await publish(publisher, 7)

    async def fail_once(*_: object) -> None:
        apart.receive_stream = plain  # type: ignore[method-assign]
        raise OSError("no more files")

    with capture_logs() as logs:
        async with publisher.evaluating():
            apart.receive_stream = fail_once  # type: ignore[method-assign, assignment]
            apart.restart("eval-0")
            await until_none_joins(apart)
    assert "no more files" in logs[0]["error"]


async def test_a_repair_for_an_evaluation_ends_with_the_run() -> None:
    # covers: C10
    fleet, apart = FakeFleet([]), FakeFleet([], joining=("eval-0",))
    publisher, begun = make(fleet, apart=apart), asyncio.Event()
    await publish(publisher, 7)

    async def hang(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def evaluate() -> None:
        async with publisher.evaluating():
            apart.receive_stream = hang  # type: ignore[method-assign, assignment]
            apart.restart("eval-0")
            await asyncio.Event().wait()

    evaluation = asyncio.ensure_future(evaluate())
    async with asyncio.timeout(30):
        await begun.wait()
        evaluation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluation
        await publisher.close()
    assert not apart.groups


async def test_a_repair_never_waits_for_a_delivery_in_the_senders() -> None:
    """All calls of a repair go through handles for repairs, whose calls run in another thread."""
    fleet = FakeFleet([])
    trainer = FakeTrainer(fleet.events, senders=2)
    calls: list[tuple[str, bool]] = []
    plain = trainer.sender

    class Noting(InProcess):
        repair = False

        async def call(self, method: Callable[..., object], *arguments: object) -> Any:
            calls.append((method.__name__, self.repair))
            return await super().call(method, *arguments)

    def noting(index: int, *, repair: bool = False) -> Any:
        handle = Noting(plain(index)._half)
        handle.repair = repair
        return handle

    trainer.sender = noting  # type: ignore[method-assign]
    publisher = make(fleet, trainer=trainer)
    await publish(publisher, 7)
    assert {repair for _, repair in calls} == {False}
    calls.clear()
    fleet.joining = ["engine-1"]
    assert await publisher.repair() == ("engine-1",)
    assert {repair for _, repair in calls} == {True}
    methods = [method for method, _ in calls]
    assert methods[:2] == ["pin"] * 2
    assert methods[-2:] == ["unpin"] * 2


@pytest.mark.parametrize(
    ("hanging", "awaited"),
    [
        ("pin", "the sending ranks, which are to pin version 7"),
        ("leave_group", "engines and sending ranks to release what they keep between deliveries"),
    ],
)
def test_a_repair_waits_for_sending_ranks_no_longer_than_a_publication(hanging: str, awaited: str) -> None:
    # covers: C10
    fleet = FakeFleet([])
    trainer = FakeTrainer(fleet.events)
    half = trainer.sender(0)._half
    trainer.sender = lambda index, repair=False: InProcess(half)  # type: ignore[method-assign,misc]

    async def story() -> None:
        publisher = make(fleet, trainer=trainer, publication_timeout=60)
        await publish(publisher, 7)
        fleet.joining = ["engine-1"]
        setattr(half, hanging, lambda _: asyncio.sleep(1e6))
        with pytest.raises(PublicationError, match=f"waited 60 s for {awaited}"):
            await publisher.repair()

    run_in_virtual_time(story())


async def test_an_engine_that_was_lost_in_a_repair_is_named_when_none_is_left() -> None:
    # covers: C10
    fleet = FakeFleet([])
    publisher = make(fleet, engines_timeout=0.05)
    await publish(publisher, 0)
    fleet.serving, fleet.joining = [], ["engine-1"]
    fleet.faults["flush"] = {"engine-1"}
    assert await publisher.repair() == ()
    with pytest.raises(PublicationError, match=r"waited 0.05 s for an engine.*engine-1 was lost: flush: .*refused"):
        await publish(publisher, 1)


async def test_staged_weights_that_were_not_delivered_repair_no_engine() -> None:
    fleet = FakeFleet([])
    publisher = make(fleet)
    await publish(publisher, 7)
    await publisher.copy(8)
    await publisher.stage(8)
    fleet.joining = ["engine-1"]
    assert await publisher.repair() == ("engine-1",)
    assert fleet.versions == {"engine-0": 7, "engine-1": 7}
    assert (await publisher.deliver(8)).engines == ("engine-0", "engine-1")
    assert fleet.versions == {"engine-0": 8, "engine-1": 8}


@pytest.mark.parametrize(
    ("part", "awaited"),
    [("copy", "the trainer's export of version 3"), ("stage", "the files of version 3 at the sending ranks")],
)
async def test_a_rank_that_never_stages_is_waited_for_until_the_deadline(part: str, awaited: str) -> None:
    # covers: C10
    publisher = make(FakeFleet([]), publication_timeout=0.05)

    states = [publisher.state]

    async def hang(version: int) -> None:
        states.append(publisher.state)
        await asyncio.Event().wait()

    setattr(publisher._trainer, f"{part}_weights", hang)
    with pytest.raises(PublicationError, match=rf"waited 0.05 s for {awaited} \(--publication-timeout\)"):
        await publish(publisher, 3)
    assert [*states, publisher.state] == [PublicationState.IDLE, PublicationState.STAGING, PublicationState.IDLE]


async def test_lag_sends_the_weights_of_earlier_versions_under_their_own_name() -> None:
    fleet = FakeFleet([])
    publisher = make(fleet, debug_publication_lag=2)
    sent = [(await publish(publisher, version)).sent_version for version in range(5)]
    assert sent == [0, 0, 0, 1, 2]


# ------------------------------------------------------------------------- transports of independent engines
async def test_order_of_a_publication_by_files() -> None:
    # covers: C8, P4
    fleet = FakeFleet([])
    publication = await publish(make(fleet, weight_transport="disk"), 0)
    assert fleet.events == [
        "copy 0", "stage 0", "probe", "abort_all", "host expect_staged", "pause retract", "flush", "load ['staged/0']",
        "digests", "resume", "trial 0", "score", "admit 0",
    ]  # fmt: skip
    assert publication.engines == ("engine-0",)
    assert (publication.total_bytes, publication.sent_fraction) == (16, 1.0)


@pytest.mark.parametrize(
    "step", ["probe", "host expect_staged", "pause retract", "flush", "load ['staged/3']", "resume"]
)
async def test_engine_that_fails_alone_is_fenced_alone(step: str) -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1", "engine-2"))
    fleet.faults[step] = {"engine-1"}
    publication = await publish(make(fleet, weight_transport="disk"), 3)
    assert fleet.serving == ["engine-0", "engine-2"]
    assert publication.fenced == ("engine-1",)
    assert not fleet.paused & {"engine-0", "engine-2"}
    assert fleet.events.count("load ['staged/3']") == 1, "the others have everything already"


# --------------------------------------------------------------------------------------- --verify-weights full
@pytest.mark.parametrize("transport", ["distributed", "disk"])
async def test_engine_that_holds_something_else_is_fenced_and_nothing_is_committed_for_it(transport: str) -> None:
    # covers: C8
    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    wrong = HeldPart(offset=0, shape=(2,), strides=(1,), dtype="float32", digest="ff")
    fleet.held["engine-0"] = HeldWeights(parts={"t0": (wrong,), "t1": (wrong,)})
    publisher = make(fleet, weight_transport=transport, verify_weights="full")
    publication = await publish(publisher, 1)
    assert (publication.engines, publication.fenced) == (("engine-1",), ("engine-0",))
    assert fleet.serving == ["engine-1"]
    assert "t0 has other elements than were sent (and 1 more)" in publisher._engines.last_loss


async def test_tensors_that_are_skipped_may_differ() -> None:
    # covers: M17
    fleet = FakeFleet([])
    right = HeldPart(offset=0, shape=(2,), strides=(1,), dtype="float32", digest=DIGEST)
    fleet.held["engine-0"] = HeldWeights(parts={"t1": (right,)})
    publication = await publish(make(fleet, verify_weights="full", verify_weights_skip=("t0", "rotary")), 1)
    assert publication.engines == ("engine-0",)


async def test_a_sample_visits_every_tensor_and_who_joins_is_compared_whole() -> None:
    # covers: C8
    fleet = FakeFleet([])
    publisher = make(fleet, verify_weights="sample", verify_weights_shares=3)
    counts = []
    for version in range(3):
        if version == 2:
            fleet.joining.append("engine-1")
        counts.append((await publish(publisher, version)).compared_tensors)
    first, *_ = fleet.shares
    assert first == TensorShare(), "it joined"
    assert fleet.shares[1:] == [TensorShare(1, 3), TensorShare(2, 3), TensorShare()]
    expected = [sum(share.includes(name) for name in ("t0", "t1")) for share in (TensorShare(1, 3), TensorShare(2, 3))]
    assert counts == [2, *expected]


async def test_tensors_that_were_not_compared_are_named_once_and_counted() -> None:
    # covers: M16
    fleet = FakeFleet([])
    right = HeldPart(offset=0, shape=(2,), strides=(1,), dtype="float32", digest=DIGEST)
    fleet.held["engine-0"] = HeldWeights(parts={"t0": (), "t1": (right,)}, other_form=("t0",))
    publisher = make(fleet)
    with capture_logs() as logs:
        publications = [await publish(publisher, version) for version in range(2)]
    assert [(p.compared_tensors, p.incomparable_tensors) for p in publications] == [(1, 1)] * 2
    assert [log["first"] for log in logs if "can't be compared" in log["event"]] == [("t0",)]


@pytest.mark.parametrize("mode", ["canary", "full"])
async def test_a_canary_that_tells_no_versions_apart_says_so(mode: str) -> None:
    # covers: C8
    fleet = FakeFleet([])
    publisher = make(fleet, verify_weights=mode)
    stage = publisher._trainer.stage_weights

    async def with_previous(version: int) -> StagedWeights:
        staged = await stage(version)
        return msgspec.structs.replace(staged, previous_canary_logprobs=staged.canary_logprobs)

    publisher._trainer.stage_weights = with_previous  # type: ignore[method-assign]
    with capture_logs() as logs:
        publication = await publish(publisher, 4)
    assert publication.canary_undecided == ("engine-0",)
    told = [log for log in logs if "could not distinguish this version" in log["event"]]
    assert len(told) == (mode == "canary"), "digests have told them apart"
