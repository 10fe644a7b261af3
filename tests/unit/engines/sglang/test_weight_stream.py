"""The receiving loop of our engines' schedulers: with gloo's own process groups, and with a stand-in for what order and
memory are asked of them.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from miles_async.engines.sglang import weight_stream
from miles_async.engines.sglang.weight_stream import received
from miles_async.types import TensorMeta
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.spec import RankSide
from tests.integration.weight_receiver import init_custom_process_group

SPAWN = multiprocessing.get_context("spawn")
CPU = torch.device("cpu")
MODULES = 12
ELEMENTS = 40_000  # of each tensor: more than the sockets between two processes hold, together
DEADLINE = 20.0


# -------------------------------------------------------------------------------------------- real groups
def weights() -> dict[str, torch.Tensor]:
    return {f"{module}.a.weight": torch.full((ELEMENTS,), float(module)) for module in range(MODULES)}


def manager(groups: dict[str, Any], load: Callable[[list[tuple[str, torch.Tensor]]], tuple[bool, str]]) -> Any:
    """SGLang's SchedulerWeightUpdaterManager, as far as a stream needs it."""
    runner = SimpleNamespace(
        weight_updater=SimpleNamespace(
            device="cpu",
            _model_update_group=groups,
            load_weights_from_distributed=load,
            destroy_weights_update_group=lambda name: dist.destroy_process_group(groups.pop(name)),
        )
    )
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), _select_runners=lambda: [("target", runner)])


def engine(ports: list[int], rank: int, world_size: int, fails_at: int | None, answers: Any, done: Any) -> None:
    """Answers with why it failed, or the sums of all tensors in the order in which they came."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = {
        f"g{sender}": init_custom_process_group("127.0.0.1", port, f"g{sender}", rank, world_size)
        for sender, port in enumerate(ports)
    }
    sums: dict[str, float] = {}

    def load(tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        if len(sums) == fails_at:
            return False, "does not fit"
        sums.update({name: float(tensor.sum()) for name, tensor in tensors})
        return True, ""

    problem = weight_stream._loaded(manager(groups, load), list(groups))
    answers.put((rank, problem, sums))
    done.wait()


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Sends the weights; returns (rank, problem, sums, seconds) per engine, and what each sender says."""
    processes: list[Any] = []
    senders: list[DistributedSender] = []
    done = SPAWN.Event()

    def run(*, engines: int = 1, count: int = 2, fails_at: int | None = None) -> list[Any]:
        answers = SPAWN.Queue()
        for sender in range(count):
            staging = StagingOptions(parent=tmp_path, bucket_bytes=ELEMENTS * 4, sender=sender, senders=count)
            side = RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=DEADLINE)
            senders.append(DistributedSender(side))
            senders[-1].copy(0, weights().items())
            senders[-1].stage(0)
        ports = [sender.open_group(f"g{index}", 1 + engines)[1] for index, sender in enumerate(senders)]
        for rank in range(1, 1 + engines):
            arguments = (ports, rank, 1 + engines, fails_at if rank == 1 else None, answers, done)
            processes.append(SPAWN.Process(target=engine, args=arguments))
            processes[-1].start()
        for index, joining in enumerate(senders):
            joining.join_group(f"g{index}")
        started = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            sent = [threads.submit(sender.send, f"g{index}", 0, True) for index, sender in enumerate(senders)]
            found = sorted((*answers.get(timeout=2 * DEADLINE), time.monotonic() - started) for _ in range(engines))
        return [*found, [each.result() for each in sent]]

    yield run
    done.set()
    for process in processes:
        process.join(20)
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("senders", [1, 2, 5])
def test_all_that_senders_broadcast_at_the_same_time_arrives_in_the_manifests_order(
    stream: Callable[..., list[Any]], senders: int
) -> None:
    # covers: C8
    *engines, sent = stream(engines=2, count=senders)
    assert sent == [None] * senders
    for _, problem, sums, _ in engines:
        assert problem is None
        assert sums == {name: float(tensor.sum()) for name, tensor in weights().items()}
        assert list(sums) == list(weights()), "bucket i is of sender i % senders"


def test_a_refusal_in_the_middle_is_known_to_all_at_once(stream: Callable[..., list[Any]]) -> None:
    # covers: C8, C10
    first, second, sent = stream(engines=2, fails_at=3)
    assert "does not fit" in first[1]
    assert second[1] is not None
    assert all(sent)
    assert max(first[-1], second[-1]) < DEADLINE / 2


# --------------------------------------------------------------------------------------- order and memory
class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"have {self._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of two groups, "a" with buckets 0, 2, 4 and "b" with 1, 3."""
    events: list[str] = []
    indices = {"a": [0, 2, 4], "b": [1, 3]}
    manifests = {
        group: msgspec.msgpack.encode({index: (TensorMeta(f"t{index}", "float32", (1 + index,)),) for index in some})
        for group, some in indices.items()
    }
    pending = {
        group: [torch.tensor([len(manifest)]), torch.frombuffer(bytearray(manifest), dtype=torch.uint8)]
        for group, manifest in manifests.items()
    }

    def broadcast(data: torch.Tensor, *, src: int, group: Any, async_op: bool = False) -> Work | None:
        if not async_op:
            data.copy_(pending[group].pop(0))
            return None
        index = indices[group].pop(0)
        events.append(f"start {index}")
        data.copy_(torch.full((1 + index,), float(index)).view(torch.uint8))
        return Work(events, str(index))

    monkeypatch.setattr(weight_stream.dist, "broadcast", broadcast)
    return events


def test_the_next_buckets_are_received_while_one_is_loaded_one_per_sender(log: list[str]) -> None:
    # covers: C8
    addresses = set()
    for [(name, tensor)] in received(["a", "b"], CPU):  # type: ignore[list-item]
        log.append(f"load {name}")
        index = int(name[1:])
        assert tensor.tolist() == [index] * (1 + index)
        addresses.add(tensor.data_ptr())
    assert log == [
        "start 0", "start 1", "start 2", "have 0", "load t0", "start 3", "have 1", "load t1", "start 4", "have 2",
        "load t2", "have 3", "load t3", "have 4", "load t4",
    ]  # fmt: skip


def test_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = msgspec.msgpack.encode({i: (TensorMeta(f"t{i}", "float32", (8 - i % 2,)),) for i in range(8)})
    pending = [torch.tensor([len(manifest)]), torch.frombuffer(bytearray(manifest), dtype=torch.uint8)]

    def broadcast(data: torch.Tensor, *, async_op: bool = False, **_: Any) -> Any:
        return Work([], "") if async_op else data.copy_(pending.pop(0))

    monkeypatch.setattr(weight_stream.dist, "broadcast", broadcast)
    seen = [tensors[0][1].data_ptr() for tensors in received(["a"], CPU)]  # type: ignore[list-item]
    assert len(set(seen[2:])) <= 3


def test_requests_for_one_bucket_are_sglangs_as_before() -> None:
    request: Any = SimpleNamespace(load_format="flattened_bucket")
    assert weight_stream._update(lambda *arguments: arguments, "manager", request) == ("manager", request)


def test_sglang_still_has_what_a_stream_uses() -> None:
    """Read, not imported: that takes 10 s."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    module, _, name = weight_stream._UPDATER.rpartition(".")
    source = (Path(found.origin).parent.parent / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"class {name}:" in source
    for used in (
        "def update_weights_from_distributed(", "def begin_weight_update(", "def end_weight_update(",
        "def _select_runners(", "def _observe_weight_load(", "def record_weight_version_after_update(",
        "def flush_cache_after_weight_update(", "load_weights_from_distributed(", "loaded_weights: bool",
        "_session: Optional", "self.tp_cpu_group = ",
    ):  # fmt: skip
        assert used in source, used
