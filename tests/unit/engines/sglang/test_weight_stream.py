"""What our engines' schedulers do with a publication, over gloo's own process groups."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from miles_async.engines.sglang import relay, weight_stream
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.spec import RankSide
from tests.integration.weight_receiver import init_custom_process_group, stream_manager
from tests.sglang_source import module_source

Stream = Callable[..., list[Any]]  # what each rank answered

pytestmark = pytest.mark.timeout(500)

FORK = multiprocessing.get_context("forkserver")  # many processes: torch is imported once
FORK.set_forkserver_preload(["miles_async.engines.sglang.weight_stream", "tests.integration.weight_receiver"])
MODULES = 12
ELEMENTS = 40_000  # of each tensor: more than the sockets between two processes hold, together
DEADLINE = 120.0  # seconds; only an engine that is never told of a failure takes as long
MIDDLE = 3  # tensors


def weights(version: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of version 2 are twice as long."""
    elements = ELEMENTS * (2 if version == 2 else 1)
    return {f"{module}.a.weight": torch.full((elements,), float(module + version)) for module in range(MODULES)}


def sums_of(version: int) -> dict[str, float]:
    return {name: float(tensor.sum()) for name, tensor in weights(version).items()}


class Refuses(Exception): ...


def refuse() -> None:
    raise Refuses


def die() -> None:
    os._exit(1)


def engine(
    ports: list[int],
    rank: int,
    nodes: Sequence[int],
    in_the_middle: Callable[[], None] | None,
    may_receive: Any,
    answers: Any,
    done: Any,
    versions: int,
) -> None:
    """Answers with why it failed; per version the sums of all tensors in the order in which they came; whether it had
    them in memory that it shares; and how many relays there were, and are left without process groups.
    """
    world_size = 1 + len(nodes)
    relay._node = lambda: nodes[rank - 1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = {
        f"g{sender}": init_custom_process_group("127.0.0.1", port, f"g{sender}", rank, world_size)
        for sender, port in enumerate(ports)
    }
    sums: list[dict[str, float]] = []
    shared = []
    relays: list[int] = []
    find_route = relay._find_route

    def counted(group: dist.ProcessGroup, own: int) -> Any:
        relays.append(own)
        return find_route(group, own)

    relay._find_route = counted

    def load(tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        try:
            if in_the_middle and len(sums[-1]) == MIDDLE:
                in_the_middle()
        except Refuses:
            return False, "does not fit"
        shared.append("memfd:weights" in Path("/proc/self/maps").read_text())
        sums[-1].update({name: float(tensor.sum()) for name, tensor in tensors})
        return True, ""

    may_receive.wait()
    problem = None
    for _ in range(versions):
        sums.append({})
        problem = problem or weight_stream._loaded(stream_manager(groups, load), list(groups))
    for name in list(groups):
        dist.destroy_process_group(groups.pop(name))
    answers.put((rank, problem, sums, any(shared), len(relays), len(relay._relays)))
    done.wait()


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """Sends the weights; returns what each engine answers, and what each sender says."""
    processes: list[Any] = []
    senders: list[DistributedSender] = []
    done = FORK.Event()

    def run(
        *,
        nodes: Sequence[int],
        count: int = 2,
        failing: Mapping[int, Callable[[], None]] = MappingProxyType({}),
        late: int | None = None,
        versions: int = 1,
    ) -> list[Any]:
        answers, events = FORK.Queue(), [FORK.Event() for _ in nodes]
        for sender in range(count):
            staging = StagingOptions(parent=tmp_path, bucket_bytes=ELEMENTS * 4, sender=sender, senders=count)
            side = RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=DEADLINE)
            senders.append(DistributedSender(side))
        ports = [sender.open_group(f"g{index}", 1 + len(nodes))[1] for index, sender in enumerate(senders)]
        for rank, may_receive in enumerate(events, start=1):
            arguments = (ports, rank, nodes, failing.get(rank), may_receive, answers, done, versions)
            processes.append(FORK.Process(target=engine, args=arguments))
            processes[-1].start()
            if rank != late:
                may_receive.set()
        for index, joining in enumerate(senders):
            joining.join_group(f"g{index}")
        sent: list[str | None] = []
        with ThreadPoolExecutor(count) as threads:
            for version in range(versions):
                for each in senders:
                    each.copy(version, weights(version).items())
                    each.stage(version)
                sending = [threads.submit(each.send, f"g{index}", version, True) for index, each in enumerate(senders)]
                if late is not None:
                    events[late - 1].set()
                sent += [each.result(2 * DEADLINE) for each in sending]
            answering = len(nodes) - list(failing.values()).count(die)
            found = sorted(answers.get(timeout=2 * DEADLINE) for _ in range(answering))
        return [*found, sent]

    yield run
    done.set()
    for process in processes:
        process.join(20)
    for sender in senders:
        sender.close()


@pytest.mark.parametrize(("senders", "nodes", "late"), [(1, (0, 0), 2), (2, (0, 1, 0, 1, 2), 3), (5, (0, 1), 1)])
def test_all_that_senders_send_at_the_same_time_arrives_in_the_manifests_order(
    stream: Stream, senders: int, nodes: Sequence[int], late: int
) -> None:
    # covers: C8
    *engines, sent = stream(nodes=nodes, count=senders, late=late)
    assert sent == [None] * senders
    for node, (_, problem, [sums], shared, *_) in zip(nodes, engines, strict=True):
        assert problem is None
        assert sums == sums_of(0)
        assert list(sums) == list(weights()), "bucket i is of sender i % senders"
        assert shared == (nodes.count(node) > 1)


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 1)])
def test_memory_stays_as_long_as_process_groups_and_sizes_of_buckets(stream: Stream, nodes: Sequence[int]) -> None:
    """Versions 0 and 1, which are alike, and two more sizes."""
    # covers: C8
    *engines, sent = stream(nodes=nodes, versions=4)
    assert sent == [None] * 8
    for _, problem, sums, _, relays, left in engines:
        assert problem is None
        assert sums == [sums_of(version) for version in range(4)]
        assert relays == 3
        assert left == 0, "memory is given back with the process groups"


@pytest.mark.parametrize(("rank", "failure"), [(1, die), (3, refuse), (4, die)])
def test_a_failure_in_the_middle_is_known_to_all_at_once(
    stream: Stream, rank: int, failure: Callable[[], None]
) -> None:
    """Whether it is the first of its node or reads the memory of another, and whoever waits for whom."""
    # covers: C8, C10
    *engines, _ = stream(nodes=(0, 1, 1, 2), failing={rank: failure})
    assert len(engines) == (3 if failure is die else 4)
    for _, problem, *_, left in engines:
        assert problem is not None
        assert "Timed out" not in problem
        assert left == 0, "memory is given back with the process groups"
    assert failure is die or "does not fit" in engines[rank - 1][1]


def test_requests_for_one_bucket_are_sglangs_as_before() -> None:
    request: object = SimpleNamespace(load_format="flattened_bucket")
    assert weight_stream._update(lambda *arguments: arguments, "manager", request) == ("manager", request)


def test_sglang_still_has_what_a_stream_uses() -> None:
    module, _, name = weight_stream._UPDATER.rpartition(".")
    source = module_source(module)
    assert f"class {name}:" in source
    for used in (
        "def update_weights_from_distributed(", "def begin_weight_update(", "def end_weight_update(",
        "def _select_runners(", "def _observe_weight_load(", "def record_weight_version_after_update(",
        "load_weights_from_distributed(", "loaded_weights: bool",
        "_session: Optional", "self.tp_cpu_group = ",
    ):  # fmt: skip
        assert used in source, used


def test_sglang_still_derives_from_weights_where_its_cuda_graphs_read() -> None:
    """docs/cuda.md says so of 0.5.23."""
    updater = module_source("sglang.srt.model_executor.model_runner_components.weight_updater")
    assert "DefaultModelLoader.restore_weights_before_loading(" in updater.partition("def begin_weight_update(")[2]
    assert "DefaultModelLoader.postprocess_weights(" in updater.partition("def end_weight_update(")[2]
    absorbed = module_source("sglang.srt.models.deepseek_common.deepseek_weight_loader")
    for name in ("w_kc", "w_vc"):
        assert absorbed.count(f"self_attn.{name} = bind_or_assign(") == 2
    assert "target.copy_(source)" in module_source("sglang.srt.utils.common").partition("def bind_or_assign(")[2][:200]
    assert "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED = EnvBool(False)" in module_source("sglang.srt.environ")
