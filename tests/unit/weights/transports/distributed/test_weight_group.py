"""The sending end of a process group whose members die, hang or stay away: deadlines hold, and only this group breaks.

gloo's groups are real; NCCL needs a GPU, so what is asked of it is checked against a stand-in.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist

from miles_async.engines.sglang import WEIGHT_GROUP_SECONDS_VARIABLE, patches
from miles_async.runtime.network.process_group_errors import BLOCKING_WAIT, errors_are_raised
from miles_async.weights.transports.distributed import weight_group
from miles_async.weights.transports.distributed.weight_group import GroupBrokenError, WeightGroup
from tests.integration.weight_receiver import init_custom_process_group
from tests.sglang_source import module_source

SECONDS = 1.0
JOIN_SECONDS = 120.0  # importing torch included
FORK = multiprocessing.get_context("forkserver")  # torch is imported once for all members
FORK.set_forkserver_preload(["tests.integration.weight_receiver"])


def member(port: int, rank: int, world_size: int, behaviour: str, done: Any) -> None:
    """An engine: joins, then receives one broadcast, or dies, or hangs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = init_custom_process_group("127.0.0.1", port, "g", rank, world_size)
    if behaviour == "dies":
        os._exit(1)
    if behaviour == "receives":
        dist.broadcast(torch.empty(4, dtype=torch.uint8), src=0, group=group)
    done.wait()


def broadcast(group: WeightGroup) -> None:
    with group.sending(torch.zeros(4, dtype=torch.uint8)):
        pass


def until_nobody_listens(port: int) -> None:
    """Of its own: collections of garbage are rare in a run."""
    gc.disable()
    try:
        deadline = time.monotonic() + 60
        while any(c.laddr.port == port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN):
            assert time.monotonic() < deadline, "the group still listens"
            time.sleep(0.05)
    finally:
        gc.enable()


@pytest.fixture
def group_of() -> Iterator[Callable[..., WeightGroup]]:
    """Makes a group whose members behave as named."""
    made: list[Any] = []
    done = FORK.Event()

    def make(*behaviours: str, world_size: int | None = None) -> WeightGroup:
        size = world_size or 1 + len(behaviours)
        options: dict[str, object] = {"address": "127.0.0.1", "backend": "gloo", "device": torch.device("cpu")}
        group = WeightGroup("g", size, timeout_seconds=JOIN_SECONDS if behaviours else SECONDS, **options)
        for rank, behaviour in enumerate(behaviours, start=1):
            made.append(FORK.Process(target=member, args=(group.port, rank, size, behaviour, done)))
            made[-1].start()
        return group

    yield make
    done.set()
    for process in made:
        process.join(60)


def test_a_broadcast_reaches_all_and_breaks_nothing(group_of: Callable[..., WeightGroup]) -> None:
    group = group_of("receives")
    group.join()
    broadcast(group)
    group.leave()
    group.leave()


@pytest.mark.parametrize("behaviour", ["dies", "hangs"])
def test_a_member_that_fails_breaks_the_broadcast_by_its_deadline_and_nothing_else(
    group_of: Callable[..., WeightGroup], monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    # covers: C8, C10
    group = group_of(behaviour)
    group.join()
    group._timeout = SECONDS
    weight_group.set_timeout(SECONDS, group._process_group)
    groups_before = len(dist.distributed_c10d._world.pg_map)
    started = time.monotonic()
    with pytest.raises(GroupBrokenError):
        broadcast(group)
    assert time.monotonic() - started < JOIN_SECONDS / 2  # its own deadline, not that of the join
    assert len(dist.distributed_c10d._world.pg_map) == groups_before - 1
    with pytest.raises(GroupBrokenError, match="is broken"):
        broadcast(group)
    group.leave()
    until_nobody_listens(group.port)


def test_members_that_stay_away_break_the_join_by_its_deadline(group_of: Callable[..., WeightGroup]) -> None:
    # covers: C8, C10
    group = group_of(world_size=2)
    with pytest.raises(GroupBrokenError):
        group.join()
    until_nobody_listens(group.port)


def test_an_operation_without_any_deadline_is_given_up_and_its_communicator_aborted(
    group_of: Callable[..., WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's set-up of a communicator, when a member never comes."""
    # covers: C8, C10
    group, forever, aborted = group_of(), threading.Event(), []
    monkeypatch.setattr(weight_group.dist, "broadcast", lambda data, **_: forever.wait())
    monkeypatch.setattr(weight_group, "_abort_process_group", aborted.append)
    monkeypatch.setattr(weight_group, "_GRACE_SECONDS", 0.1)
    process_group: object = object()
    group._process_group = process_group
    with pytest.raises(GroupBrokenError, match="no end of an operation within 1 s"):
        broadcast(group)
    assert aborted == [process_group]
    group.leave()
    forever.set()


def test_groups_are_made_so_that_their_errors_are_raised_and_no_other_group_is(
    group_of: Callable[..., WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable that ProcessGroupNCCL reads when it is made."""
    found = []

    def make(*_: object, **__: object) -> Any:
        found.append(os.environ.get(BLOCKING_WAIT))
        return dist.ProcessGroup(dist.HashStore(), 0, 1), None

    monkeypatch.setattr(weight_group, "_new_process_group_helper", make)
    monkeypatch.setattr(weight_group, "set_timeout", lambda *_: None)
    group_of().join()
    assert found == ["1"]
    assert BLOCKING_WAIT not in os.environ
    first, second = errors_are_raised(), errors_are_raised()  # of a delivery and a repair
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ[BLOCKING_WAIT] == "1"
    second.__exit__(None, None, None)
    assert BLOCKING_WAIT not in os.environ
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    with errors_are_raised():
        assert os.environ[BLOCKING_WAIT] == "1"
    assert os.environ[BLOCKING_WAIT] == "0"


def test_deadlines_are_changed_by_the_public_name_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.14 warns about the private one."""
    seconds, group = datetime.timedelta(seconds=2), dist.ProcessGroup(dist.HashStore(), 0, 1)
    private, public = MagicMock(), MagicMock()
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", private)
    weight_group.set_timeout(2, group)
    private.assert_called_once_with(seconds, group)
    monkeypatch.setattr(dist, "set_timeout", public, raising=False)
    weight_group.set_timeout(2, group)
    public.assert_called_once_with(seconds, group)
    private.assert_called_once()


# ------------------------------------------------------------------------------------- the engine's end
def test_an_engine_waits_for_other_members_no_longer_than_told_and_survives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # covers: C8, C10
    monkeypatch.setenv(WEIGHT_GROUP_SECONDS_VARIABLE, "12.5")
    made = []

    def make(**options: object) -> None:
        made.append((options, os.environ.get(BLOCKING_WAIT)))

    patches.with_deadline(make, backend="nccl", world_size=3)
    options = {"backend": "nccl", "world_size": 3, "timeout": datetime.timedelta(seconds=12.5)}
    assert made == [(options, "1")]
    assert BLOCKING_WAIT not in os.environ


def test_sglang_still_makes_groups_without_a_deadline_where_we_add_one() -> None:
    module, _, name = patches.GROUP_MAKER.rpartition(".")
    call = module_source(module).partition(f"= {name}(")[2].partition("\n            )")[0]
    assert "group_name=group_name" in call
    assert "timeout" not in call
