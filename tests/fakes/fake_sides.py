"""Fakes of the two sides for tests of the publisher and the controller: they write down what is called.

Held against the real thing by tests/unit/test_fakes_contract.py.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from miles_async.errors import EngineError
from miles_async.runtime.files.digests import digest_pieces, split
from miles_async.seams import Resumption, arguments_of
from miles_async.types import (
    CanaryScore,
    Changes,
    EngineLoad,
    FleetMembers,
    HeldPart,
    HeldWeights,
    Incarnation,
    PreparedBatch,
    Publication,
    RolloutStats,
    SettingValue,
    StagedWeights,
    TensorMeta,
    TensorShare,
    TokenScores,
)
from miles_async.weights.publisher import WeightPublisher

CANARY = (1, 2, 3)
CANARY_LOGPROBS = (-1.0, -2.0)
DIGEST = "00000000000000aa"  # of every tensor

Answer = TypeVar("Answer")
Results = Mapping[Incarnation, Any]  # as the operation says


class InProcess:
    """SenderHandle of a half that lives in this process; its methods may be coroutine functions."""

    def __init__(self, half: object) -> None:
        self._half = half

    async def call(self, method: Callable[..., Answer], *arguments: object) -> Answer:
        answer = getattr(self._half, method.__name__)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer


class FakeBroadcaster:
    """The sending rank's half of ``distributed``."""

    def __init__(self, events: list[str], suffix: str) -> None:
        self._events = events
        self._suffix = suffix

    def pin(self, version: int) -> None: ...

    def unpin(self, version: int) -> None: ...

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        self._events.append(f"open {world_size}{self._suffix}")
        return "127.0.0.1", 1

    def join_group(self, group_name: str) -> None: ...

    def send(self, group_name: str, version: int, announce: bool) -> str | None:
        self._events.append(f"{'announce and ' if announce else ''}send {version}{self._suffix}")
        return None

    def leave_group(self, group_name: str) -> None: ...


class FakeTrainer:
    """TrainerSide whose weights are a number: the steps trained so far."""

    def __init__(self, events: list[str], *, buckets: int = 2, senders: int = 1, train_seconds: float = 0.0) -> None:
        self.events = events
        self.buckets = buckets
        self.senders = senders
        self.train_seconds = train_seconds
        self.trained: list[PreparedBatch] = []
        self.token_scores: Sequence[TokenScores] = ()

    async def start(self) -> None: ...

    async def train(self, shards: Sequence[object]) -> Mapping[str, float]:
        self.events.append("train")
        await asyncio.sleep(self.train_seconds)
        return {"loss": 0.0}

    async def change(self, values: Mapping[str, SettingValue]) -> None:
        self.events.append(f"change {dict(values)}")

    async def copy_weights(self, version: int) -> None:
        self.events.append(f"copy {version}")

    async def stage_weights(self, version: int) -> StagedWeights:
        self.events.append(f"stage {version}")
        return StagedWeights(
            version=version,
            directory=f"staged/{version}",
            buckets={i: (TensorMeta(f"t{i}", "float32", (2,), DIGEST),) for i in range(self.buckets)},
            total_bytes=8 * self.buckets,
            senders=self.senders,
            canary_tokens=CANARY,
            canary_logprobs=CANARY_LOGPROBS,
        )

    def sender(self, index: int, *, repair: bool = False) -> InProcess:
        return InProcess(FakeBroadcaster(self.events, f" by {index}" if self.senders > 1 else ""))

    async def save(self, directory: Path) -> Mapping[str, str]:
        return {}

    async def stage_save(self, directory: Path) -> None: ...

    async def write_save(self) -> Mapping[str, str]:
        return {}

    async def save_hf(self, directory: Path) -> None: ...

    async def load(self, directory: Path, *, step: int) -> None: ...

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        return digest_pieces(directory, split(sizes))

    async def stop(self) -> None: ...


class FakeFleet:
    """EngineFleet of engines that hold a version; ``faults[step]`` names engines that fail at that step."""

    def __init__(
        self,
        events: list[str],
        *,
        serving: Sequence[str] = (),
        joining: Sequence[str] = ("engine-0",),
        tensors: Sequence[str] = ("t0", "t1"),
    ) -> None:
        """``tensors``: what is in a stream."""
        self.events = events
        self.serving = list(serving)
        self.joining = list(joining)
        self.tensors = tensors
        self.faults: dict[str, set[str]] = {}
        self.labels: dict[str, str] = {}  # what an engine says its version is, where it isn't the truth
        self.logprobs: dict[str, tuple[float, ...]] = {}
        self.groups: dict[str, set[str]] = {}  # process groups, by name
        self.held: dict[str, HeldWeights] = {}  # by engine, where it isn't what was staged
        self.shares: list[TensorShare] = []  # of which digests were asked for
        self.versions: dict[str, int] = {}
        self.paused: set[str] = set()
        self.bucketwise: frozenset[str] = frozenset()
        self.ranks = 1  # of each engine
        self.first_ranks: object = None  # in the process group that was joined last
        self.sent: list[tuple[Incarnation, ...]] = []  # engines whose senders had finished
        self.sessions: set[str] = set()  # engines between begin and end of an update
        self.complete: dict[str, list[str]] = {}  # tensors received in the session
        self.fenced: list[str] = []
        self.restarts: Counter[str] = Counter()

    async def members(self) -> FleetMembers:
        return FleetMembers(
            serving=tuple(map(self.current, self.serving)),
            joining=tuple(map(self.current, self.joining)),
            starting=(),
            ranks=dict.fromkeys((*self.serving, *self.joining), self.ranks),
            bucketwise=self.bucketwise,
        )

    def current(self, engine: str) -> Incarnation:
        return Incarnation(engine, self.restarts[engine])

    def restart(self, engine: str) -> None:
        """It dies, and is up again at once."""
        self.restarts[engine] += 1
        self.sessions.discard(engine)
        self.versions.pop(engine, None)
        self.complete.pop(engine, None)
        self.serving = [other for other in self.serving if other != engine]
        self.joining = [*(other for other in self.joining if other != engine), engine]

    def _result(self, step: str, engines: Sequence[Incarnation]) -> dict[Incarnation, Exception | None]:
        self.events.append(step)
        return {engine: self._error(step, engine) for engine in engines}

    def _error(self, step: str, engine: Incarnation) -> Exception | None:
        if engine != self.current(engine.engine) or engine.engine not in (*self.serving, *self.joining):
            return EngineError(f"{engine} was lost")
        return EngineError(f"{step} refused") if engine.engine in self.faults.get(step, ()) else None

    async def call(
        self, engines: Sequence[Incarnation], operation: Callable[..., object], *arguments: object, brief: bool = False
    ) -> Results:
        """Run the method below that has the operation's name; an operation without one only succeeds or fails."""
        if not engines:
            return {}
        if method := getattr(self, operation.__name__, None):
            results: Results = await method(engines, *arguments)
            return results
        return self._result(operation.__name__, engines)

    async def weight_version(self, engines: Sequence[Incarnation]) -> Results:
        return {engine: str(self.versions.get(engine.engine, "default")) for engine in engines}

    async def pause(self, engines: Sequence[Incarnation], mode: str) -> Results:
        self.paused |= ids(engines)
        return self._result(f"pause {mode}", engines)

    async def resume(self, engines: Sequence[Incarnation]) -> Results:
        self.paused -= ids(engines)
        return self._result("resume", engines)

    async def flush_cache(self, engines: Sequence[Incarnation]) -> Results:
        return self._result("flush", engines)

    async def release_memory(self, engines: Sequence[Incarnation]) -> Results:
        return self._result("release", engines)

    async def retake_memory(self, engines: Sequence[Incarnation]) -> Results:
        return self._result("retake", engines)

    async def join_group(
        self, engines: Sequence[Incarnation], ranks: object, group_name: str, *rest: object
    ) -> Results:
        errors = self._result("connect", engines)
        self.first_ranks = [arguments_of(engine, [ranks])[0] for engine in engines]
        if not any(errors.values()):
            self.groups[group_name] = ids(engines)
        return errors

    async def leave_group(self, engines: Sequence[Incarnation], group_name: str) -> Results:
        self.groups.pop(group_name, None)
        return self._result("disconnect", engines)

    async def begin_update(self, engines: Sequence[Incarnation]) -> Results:
        result = self._result("begin", engines)
        for engine in engines:
            if engine.engine in self.sessions:  # SGLang refuses a second session
                result[engine] = EngineError("a weight-update session is already open")
            elif result[engine] is None:
                self.sessions.add(engine.engine)
                self.complete[engine.engine] = []
        return result

    async def end_update(self, engines: Sequence[Incarnation]) -> Results:
        self.sessions -= ids(engines)
        return self._result("end", engines)

    async def receive_bucket(
        self, engines: Sequence[Incarnation], _: str, tensors: Sequence[TensorMeta], version: int
    ) -> Results:
        self.versions |= dict.fromkeys(ids(engines), version)
        result = self._together(f"receive {tensors[0].name}", engines)
        for engine, error in result.items():
            if error is None:
                self.complete[engine.engine] += [tensor.name for tensor in tensors]
        return result

    async def receive_stream(self, engines: Sequence[Incarnation], group_names: Sequence[str], version: int) -> Results:
        self.versions |= dict.fromkeys(ids(engines), version)
        result = self._together("receive all", engines)
        self.complete |= {engine.engine: [*self.tensors] for engine, error in result.items() if error is None}
        return result

    async def receive_handles(
        self, engines: Sequence[Incarnation], handles: str, ranks: object, version: int
    ) -> Results:
        self.versions |= dict.fromkeys(ids(engines), version)
        return self._result(f"open {handles}", engines)

    async def load_files(self, engines: Sequence[Incarnation], directories: object, version: int) -> Results:
        self.versions |= dict.fromkeys(ids(engines), version)
        found = sorted({str(arguments_of(engine, [directories])[0]) for engine in engines})
        return self._result(f"load {found}", engines)

    async def score(self, engines: Sequence[Incarnation], tokens: Sequence[int]) -> Results:
        return {
            engine: error
            or CanaryScore(
                self.labels.get(engine.engine, str(self.versions.get(engine.engine))),
                np.array(self.logprobs.get(engine.engine, CANARY_LOGPROBS), np.float32),
            )
            for engine, error in self._result("score", engines).items()
        }

    async def report_weights(self, engines: Sequence[Incarnation], share: TensorShare) -> Results:
        self.shares.append(share)
        errors = self._result("digests", engines)
        return {engine: error or engine.engine for engine, error in errors.items()}

    async def held_weights(self, engines: Sequence[Incarnation], report: str) -> Results:
        return {engine: self._held(engine.engine) for engine in engines}

    async def stream_sent(self, engines: Sequence[Incarnation], *, broken: bool) -> None:
        self.sent.append(tuple(engines))

    def _together(self, step: str, engines: Sequence[Incarnation]) -> dict[Incarnation, Exception | None]:
        """One broken member breaks the process group for all."""
        result = self._result(step, engines)
        if any(result.values()):
            result = {engine: error or EngineError("connection closed by peer") for engine, error in result.items()}
        return result

    async def on_host(
        self,
        engines: Sequence[Incarnation],
        function: Callable[..., object],
        *arguments: object,
        room: int = 0,
    ) -> Mapping[Incarnation, object | Exception]:
        return self._result(f"host {function.__name__}", engines)

    def _held(self, engine: str) -> HeldWeights:
        part = HeldPart(offset=0, shape=(2,), strides=(1,), dtype="float32", digest=DIGEST)
        return self.held.get(engine) or HeldWeights(
            parts=dict.fromkeys(self.complete.get(engine, ("t0", "t1")), (part,))
        )

    async def begin_trial(self, engines: Sequence[Incarnation], version: int) -> None:
        self.events.append(f"trial {version}")

    async def admit(self, engines: Sequence[Incarnation], version: int) -> Mapping[Incarnation, Exception | None]:
        result = self._result(f"admit {version}", engines)
        admitted = ids(engine for engine, error in result.items() if error is None)
        self.joining = [engine for engine in self.joining if engine not in admitted]
        self.serving = sorted({*self.serving, *admitted})
        return result

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        fenced = {e.engine for e in engines if e == self.current(e.engine)}
        self.restarts.update(fenced)
        self.fenced += sorted(fenced)
        self.sessions -= fenced  # its process is ended
        self.serving = [engine for engine in self.serving if engine not in fenced]
        self.joining = [engine for engine in self.joining if engine not in fenced]


def ids(engines: Iterable[Incarnation]) -> set[str]:
    return {engine.engine for engine in engines}


class FakeRollout:
    """RolloutSide that always has a batch, of the given age."""

    def __init__(self, events: list[str], *, age: int = 0) -> None:
        self.events = events
        self.age = age
        self.error: Exception | None = None
        self.evaluation_error: Exception | None = None
        self.stale: dict[int, list[int]] = {}  # version → answers of count_stale, the next one last; then 0
        self.closed = asyncio.Event()
        self.batches = 0
        self.evaluated_sets: list[Collection[str] | None] = []
        self.scores: list[Sequence[TokenScores]] = []  # of the batches that were trained

    async def run(self) -> None:
        if self.error:
            raise self.error
        await self.closed.wait()

    async def next_batch(self, target_version: int) -> PreparedBatch:
        self.events.append(f"cut for {target_version}")
        self.batches += 1
        return PreparedBatch(
            batch_id=self.batches,
            target_version=target_version,
            oldest_version=max(0, target_version - self.age),
            prompt_ids=("prompt-0", "prompt-1"),
            shards=(),
            metrics={"reward/mean": 0.5},
            ages={self.age: 8},
        )

    async def change(self, changes: Changes) -> None:
        self.events.append(f"change {dict(changes.values)} after {changes.after}")

    async def trained(self, batch_id: int, scores: Sequence[TokenScores] = ()) -> None:
        self.events.append("trained")
        self.scores.append(scores)

    async def commit_version(self, version: int) -> None:
        self.events.append(f"commit {version}")

    async def wait_for_joining(self) -> None:
        await asyncio.Event().wait()

    async def evaluate(self, step: int, data_sets: Collection[str] | None = None) -> Mapping[str, float]:
        self.events.append("evaluate")
        self.evaluated_sets.append(data_sets)
        if self.evaluation_error:
            raise self.evaluation_error
        return {"eval/reward": 1.0}

    async def evaluated(self) -> int:
        return self.events.count("evaluate")

    async def last_stats(self) -> RolloutStats:
        return RolloutStats(balance={}, gauges={}, router={}, busy_seconds=0.0, seconds=0.0)

    async def canary(self) -> tuple[int, ...]:
        return ()

    async def scale(self, group: str, engines: int) -> None: ...

    async def engines(self) -> str:
        return "no engines"

    async def describe(self) -> str:
        return "pool"

    async def count_stale(self, version: int) -> int:
        return self.stale.get(version, []).pop() if self.stale.get(version) else 0

    async def snapshot(self) -> None:
        self.events.append("snapshot")

    async def save(self, directory: Path) -> Mapping[str, str]:
        self.events.append(f"rollout saved {directory.name}")
        return {}

    async def load(self, directory: Path, resumption: Resumption) -> None:
        self.events.append(f"rollout loaded {directory.name}, to go on from {resumption.version}")

    async def close(self) -> None:
        self.closed.set()

    async def stop(self) -> None: ...


class FakeEngineLoads:
    """EngineLoads of engines that the test speaks for."""

    def __init__(self, serving: int = 1) -> None:
        self.engines: dict[str, EngineLoad] = {}
        self._serving = serving
        self._changed = asyncio.Event()

    def serve(self, engines: int) -> None:
        self._serving = engines
        self._changed.set()

    async def serving(self, other_than: int) -> int:
        while self._serving == other_than:
            self._changed.clear()
            await self._changed.wait()
        return self._serving

    async def loads(self) -> Mapping[str, EngineLoad]:
        return self.engines


async def publish(publisher: WeightPublisher, version: int) -> Publication:
    """Bring every engine to the trainer's weights, named ``version``, with nothing in between."""
    await publisher.copy(version)
    await publisher.stage(version)
    return await publisher.deliver(version)
