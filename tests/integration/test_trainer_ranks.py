"""TrainerRanks: Ray actors around real Megatron ranks, from start to stop, weights sent to a receiver, ranks dying."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.errors import CheckpointError, ConfigurationError, ProcessLostError, StalledError, TrainerError
from miles_async.runtime.processes.fork_server_process import ForkServer
from miles_async.trainer import ranks
from miles_async.trainer.placement import RankResources
from miles_async.trainer.ranks import TrainerRanks
from miles_async.types import RanksReport, StagedWeights
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed.driver import Broadcasts
from miles_async.weights.transports.spec import RankSide
from tests.integration.tiny_models import save_tiny_qwen3
from tests.integration.toy_batches import to_shards, toy_samples
from tests.integration.weight_receiver import import_all, receive

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

CANARY = tuple(range(3, 20))
SENDER_TIMEOUT = 5.0


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(
        "local",  # not what another test has started
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3", tied=True)


# Factories run in the actors: the heavy imports are theirs.
def make_backend(directory: Path, **rank: Any) -> Any:
    from miles_async.algorithms.objective import make_objective
    from miles_async.backends.megatron.backend import MegatronBackend

    return MegatronBackend(
        model=ModelArguments(hf_checkpoint=directory),
        optimizer=OptimizerArguments(lr=1e-3),
        critic=CriticArguments(),
        total_steps=10,
        temperature=0.8,
        objective=partial(make_objective, AlgorithmArguments()),
        device="cpu",
        **rank,
    )


def make_sender(directory: Path, address: str, *, sender: int, senders: int) -> Any:
    from miles_async.weights.transports.distributed.rank import DistributedSender

    staging = StagingOptions(parent=directory, bucket_bytes=64 * 1024, sender=sender, senders=senders)
    return DistributedSender(RankSide(staging=staging, address=address, device="cpu", timeout_seconds=SENDER_TIMEOUT))


@pytest.fixture(scope="module")
def resources(rank_imports: ForkServer) -> RankResources:
    return RankResources.for_device("cpu", {}, rank_imports.interpreter("ray::TrainerActor"))


def trainer_ranks(directory: Path, resources: RankResources, **options: object) -> TrainerRanks:
    defaults: dict[str, object] = {
        "world_size": 2,
        "resources": resources,
        "backend": partial(make_backend, directory),
        "sender": partial(make_sender, directory.parent / "staged"),
        "canary_tokens": CANARY,
        "start_timeout": 120.0,
        "step_timeout": 60.0,
    }
    return TrainerRanks(**(defaults | options))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    model: Path, resources: RankResources, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TrainerRanks]:
    """Two data-parallel ranks, shared by the tests in which nobody dies."""
    staged = tmp_path_factory.mktemp("staged")
    sender = partial(make_sender, staged)
    times = tmp_path_factory.mktemp("run") / "ranks.json"
    logs = tmp_path_factory.mktemp("logs")
    running = trainer_ranks(model, resources, sender=sender, log_directory=logs, times_file=times)
    await running.start()
    yield running
    pids = [info.pid for info in running.ranks]
    await running.stop()
    await running.stop()  # a second time does nothing
    await wait_until_gone(pids)
    assert list(staged.iterdir()) == []


def references(seed: int = 0) -> list[Any]:
    return [ray.put(shard) for shard in to_shards([toy_samples(8, seed=seed)], dp_size=2, micro_batches=2)]


async def stage(trainer: TrainerRanks, version: int) -> StagedWeights:
    await trainer.copy_weights(version)
    return await trainer.stage_weights(version)


async def wait_until_gone(pids: list[int], seconds: float = 60.0) -> None:
    processes = [process for process in psutil.process_iter() if process.pid in pids]
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, seconds)
    assert not alive


async def test_a_step_trains_all_ranks_on_their_own_shards(trainer: TrainerRanks) -> None:
    assert trainer.data_parallel_size == 2
    assert [info.sender for info in trainer.ranks] == [0, None]
    metrics = await trainer.train(references())
    samples = toy_samples(8)
    assert metrics["tokens"] == sum(len(sample.tokens) for sample in samples)
    assert metrics["loss_tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    with pytest.raises(TrainerError, match="expected 2 shards"):
        await trainer.train(references()[:1])


async def test_every_rank_tells_what_the_parts_of_a_step_took(trainer: TrainerRanks) -> None:
    assert trainer._times_file is not None
    trainer._times_file.unlink(missing_ok=True)
    began = time.time()
    await trainer.train(references())
    lasted = time.time() - began
    times = msgspec.json.decode(trainer._times_file.read_bytes(), type=RanksReport).steps[-1]
    assert len(times) == 2
    for rank in times:
        assert began - 0.1 < rank.began < began + lasted
        assert [*rank.seconds] == ["packing", "scoring", "forward and backward", "reducing gradients", "optimizer"]
        assert 0 < sum(rank.seconds.values()) < lasted
        assert rank.seconds["forward and backward"] > 0


async def test_output_of_ranks_goes_to_the_log_directory(trainer: TrainerRanks) -> None:  # covers: A7
    assert trainer._actors._log_directory is not None
    assert sorted(path.name for path in trainer._actors._log_directory.iterdir()) == ["trainer-0.log", "trainer-1.log"]


async def test_staged_weights_reach_a_receiver_as_they_were_staged(trainer: TrainerRanks, model: Path) -> None:
    # covers: C8, P4
    await trainer.copy_weights(1)
    async with asyncio.TaskGroup() as scope:
        staging = scope.create_task(trainer.stage_weights(1))
        await trainer.train(references())  # the trainer goes on: what was copied must not follow
    staged = staging.result()
    assert staged.version == 1
    assert 0 < staged.copy_seconds < staged.prepare_seconds
    sent = [meta for bucket in staged.buckets.values() for meta in bucket]
    assert staged.total_bytes == sum(int(np.prod(meta.shape)) * 4 for meta in sent)
    assert len(staged.buckets) > 2
    assert len(staged.canary_logprobs) == len(CANARY) - 1
    newer = await stage(trainer, 2)
    assert newer.canary_logprobs != staged.canary_logprobs

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, import_all)  # it may take longer than the sender waits
        address, port = await trainer.sender(0).call(Broadcasts.open_group, "weights-1", 2)
        arguments = (address, port, "weights-1", 1, 2, tuple(staged.buckets.values()))
        receiving = loop.run_in_executor(pool, receive, *arguments)
        await trainer.sender(0).call(Broadcasts.join_group, "weights-1")
        assert await trainer.sender(0).call(Broadcasts.send, "weights-1", 1, False) is None
        received = await asyncio.wait_for(receiving, 90)
    await trainer.sender(0).call(Broadcasts.leave_group, "weights-1")

    assert list(received) == [meta.name for meta in sent]
    logprobs = canary_logprobs(model, received)
    np.testing.assert_allclose(logprobs, staged.canary_logprobs, atol=1e-5)


def canary_logprobs(model: Path, weights: dict[str, np.ndarray]) -> list[float]:
    """By transformers, at temperature 1, with the weights received."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    reference.load_state_dict(state, strict=False)  # tied: no lm_head of its own
    with torch.no_grad():
        scores = torch.log_softmax(reference(torch.tensor([CANARY])).logits[0, :-1], -1)
    return [scores[i, token].item() for i, token in enumerate(CANARY[1:])]


async def test_a_member_that_stays_away_costs_the_timeout_and_nothing_else(trainer: TrainerRanks) -> None:
    # covers: C8, C10
    await stage(trainer, 3)
    await trainer.sender(0).call(Broadcasts.open_group, "weights-absent", 2)
    started = time.monotonic()
    await trainer.sender(0).call(Broadcasts.join_group, "weights-absent")
    assert time.monotonic() - started < SENDER_TIMEOUT + 60  # far below the default of its group, half an hour
    assert "never complete" in await trainer.sender(0).call(Broadcasts.send, "weights-absent", 3, True)
    await trainer.sender(0).call(Broadcasts.leave_group, "weights-absent")
    await trainer.sender(0).call(Broadcasts.leave_group, "weights-absent")
    assert (await trainer.train(references()))["loss_tokens"] > 0


async def test_training_goes_on_while_the_transport_waits(trainer: TrainerRanks) -> None:
    await trainer.sender(0).call(Broadcasts.open_group, "weights-slow", 2)
    async with asyncio.TaskGroup() as scope:
        joining = scope.create_task(trainer.sender(0).call(Broadcasts.join_group, "weights-slow"))
        await trainer.train(references())
        assert not joining.done()
    await trainer.sender(0).call(Broadcasts.leave_group, "weights-slow")


async def test_only_the_newest_versions_stay_staged(trainer: TrainerRanks) -> None:
    for version in (10, 11, 12):
        await stage(trainer, version)
    with pytest.raises(TrainerError, match=r"version 10 are not staged, only \[11, 12\]"):
        await trainer.sender(0).call(Broadcasts.send, "any", 10, True)
    assert (await trainer.train(references()))["loss_tokens"] > 0  # an error of the transport ends nobody


async def test_checkpoint_and_hf_export(trainer: TrainerRanks, tmp_path: Path) -> None:  # covers: C9
    made = await trainer.save(tmp_path / "trainer")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "trainer").iterdir()}
    found = await trainer.digests(tmp_path / "trainer", sizes)  # by both ranks
    assert {"__0_0.distcp", "__1_0.distcp", "position.json"} <= made.keys() <= found.keys() == sizes.keys()
    assert made == {name: found[name] for name in made}
    before = await stage(trainer, 20)
    first = [await trainer.train(references(seed)) for seed in (1, 2)]
    await trainer.load(tmp_path / "trainer", step=0)
    assert (await stage(trainer, 21)).canary_logprobs == before.canary_logprobs
    again = [await trainer.train(references(seed)) for seed in (1, 2)]
    assert [m["loss"] for m in again] == [m["loss"] for m in first]
    await trainer.save_hf(tmp_path / "hf")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "hf").iterdir()}


async def test_training_goes_on_while_a_checkpoint_is_written(trainer: TrainerRanks, tmp_path: Path) -> None:
    # covers: C9, C10
    await trainer.stage_save(tmp_path / "stuck")
    reader = _stuck_disk(tmp_path / "stuck", rank=1)
    writing = asyncio.ensure_future(trainer.write_save())
    await trainer.train(references())
    assert not writing.done()
    await asyncio.to_thread(reader)  # a file that cannot be synced
    with pytest.raises(CheckpointError, match=r"cannot write .*stuck: .*Illegal seek"):
        await asyncio.wait_for(writing, 90)
    await trainer.stage_save(tmp_path / "whole")  # a save that failed ends nobody
    await trainer.save(tmp_path / "waited")
    first = [await trainer.train(references(seed)) for seed in (1, 2)]
    made = await trainer.write_save()
    sizes = {name: (tmp_path / "whole" / name).stat().st_size for name in made}
    assert {"__0_0.distcp", "__1_0.distcp"} <= made.keys()
    assert made == await trainer.digests(tmp_path / "whole", sizes)
    steps = [json.loads((tmp_path / name / "position.json").read_text())["step"] for name in ("whole", "waited")]
    assert steps[0] == steps[1] > 0  # as they were when it was staged
    for file in (tmp_path / "waited").glob("*.distcp"):
        assert (tmp_path / "whole" / file.name).read_bytes() == file.read_bytes()
    await trainer.load(tmp_path / "whole", step=0)
    again = [await trainer.train(references(seed)) for seed in (1, 2)]
    assert [m["loss"] for m in again] == [m["loss"] for m in first]


def _stuck_disk(directory: Path, *, rank: int) -> Callable[[], object]:
    """Make the file of ``rank`` a pipe, whose writer waits until the result is called."""
    pipe = directory / f"__{rank}_0.distcp"
    os.mkfifo(pipe)
    return pipe.read_bytes


# ----------------------------------------------------------------------------------- in which somebody dies
async def test_a_rank_that_dies_while_it_writes_a_checkpoint_surfaces_at_once(
    model: Path, resources: RankResources, tmp_path: Path
) -> None:
    # covers: A1, C9, C10
    running = trainer_ranks(model, resources, canary_tokens=())
    await running.start()
    pids = [info.pid for info in running.ranks]
    await running.stage_save(tmp_path / "never")
    _stuck_disk(tmp_path / "never", rank=1)
    writing = asyncio.ensure_future(running.write_save())
    await running.train(references())
    assert not writing.done()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="trainer rank 1 died"):
        await asyncio.wait_for(writing, 90)
    await wait_until_gone(pids)
    assert not (tmp_path / "never" / "metadata.json").exists()
    await running.stop()


async def test_a_rank_that_dies_while_nothing_is_asked_of_it_surfaces(
    model: Path, resources: RankResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: A1, C10
    monkeypatch.setattr(ranks, "IDLE_PING_SECONDS", 0.2)
    running = trainer_ranks(model, resources, canary_tokens=())
    await running.start()
    pids = [info.pid for info in running.ranks]
    supervision = asyncio.ensure_future(running.supervise())
    await asyncio.sleep(1.0)  # it has looked
    await running.train(references())
    assert not supervision.done()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="trainer rank 1 died"):
        await asyncio.wait_for(supervision, 90)
    await wait_until_gone(pids)
    with pytest.raises(TimeoutError):  # of ranks that are gone, the call that lost them has told why
        await asyncio.wait_for(running.supervise(), 1.0)
    await running.stop()


async def test_a_dead_rank_surfaces_at_once_with_its_rank(model: Path, resources: RankResources) -> None:
    # covers: A1, C10
    running = trainer_ranks(model, resources, canary_tokens=())
    await running.start()
    pids = [info.pid for info in running.ranks]
    await running.train(references())

    async def train_forever() -> None:
        while True:
            await running.train(references())

    training = asyncio.ensure_future(train_forever())
    await asyncio.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="trainer rank 1 died"):
        await asyncio.wait_for(training, 90)
    await wait_until_gone(pids)  # the others would have waited in a collective
    with pytest.raises(TrainerError, match="not running"):
        await running.train(references())
    await running.stop()


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("config", ConfigurationError, "sliding_window"),
        ("absent", ConfigurationError, "does not exist"),
        ("one rank", TrainerError, "trainer rank 1 failed: RuntimeError: no luck"),
        ("hangs", StalledError, r"ranks \[1\] did not answer within 30 s at startup \(--trainer-start-timeout\)"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    model: Path, resources: RankResources, tmp_path: Path, broken: str, error: type[Exception], message: str
) -> None:
    # covers: C10
    if broken == "config":
        backend = partial(make_backend, save_tiny_qwen3(tmp_path, tied=True, use_sliding_window=True, sliding_window=8))
    elif broken == "absent":
        backend = partial(make_backend, tmp_path / "absent")
    else:
        backend = partial(_rank_1_fails, broken == "hangs")
    running = trainer_ranks(model, resources, backend=backend, start_timeout=30.0 if broken == "hangs" else 120.0)
    with pytest.raises(error, match=message):
        await running.start()
    assert not running._actors.running


def _rank_1_fails(hangs: bool, *, rank: int, **_: object) -> _Idle:
    if rank == 1 and hangs:
        time.sleep(600)
    if rank == 1:
        raise RuntimeError("no luck")
    return _Idle()


class _Idle:
    data_parallel_rank = 0
    pipeline_stage = 0

    def train(self, shard: object) -> dict[str, float]:
        return {}

    def export_weights(self) -> Iterator[Any]:
        import torch

        yield "linear.weight", torch.ones(2)


@pytest.mark.parametrize(
    ("dies", "error", "message"),
    [
        (True, ProcessLostError, "trainer rank 0 died"),
        (False, TrainerError, r"version 1 cannot be staged .*No space left on device \(--weight-staging-dir\)"),
    ],
)
async def test_what_fails_while_training_goes_on_surfaces_where_files_are_waited_for(
    resources: RankResources, tmp_path: Path, dies: bool, error: type[Exception], message: str
) -> None:
    # covers: C8, C10
    backend, sender = (lambda **_: _Idle()), partial(_sender_that_cannot_write, tmp_path, dies)
    running = trainer_ranks(tmp_path, resources, world_size=1, backend=backend, sender=sender, canary_tokens=())
    await running.start()
    await running.copy_weights(1)
    with pytest.raises(error, match=message):
        await running.stage_weights(1)
    if not dies:
        assert await running.train([None]) == {}
    await running.stop()


def _sender_that_cannot_write(directory: Path, dies: bool, address: str, *, sender: int, senders: int) -> Any:
    from miles_async.weights.staging import Staging

    class Failing(Staging):
        def _write(self, *_: object) -> StagedWeights:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("No space left on device")

    return Failing(StagingOptions(parent=directory, bucket_bytes=100))


async def test_a_cluster_without_room_is_named_as_the_reason(model: Path) -> None:
    running = trainer_ranks(model, RankResources(num_cpus=1, num_gpus=1), start_timeout=3.0)
    with pytest.raises(TrainerError, match="--actor-num-gpus-per-node"):
        await running.start()


async def test_loading_what_is_no_checkpoint_is_a_checkpoint_error(
    model: Path, resources: RankResources, tmp_path: Path
) -> None:
    running = trainer_ranks(model, resources, world_size=1)
    await running.start()
    with pytest.raises(CheckpointError, match="holds no trainer checkpoint"):
        await running.load(tmp_path, step=0)
    await running.stop()
