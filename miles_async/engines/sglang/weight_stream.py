"""In the server's process: all buckets of a publication by one request, received ahead and loaded as they come.

SGLang (0.5.23) takes one bucket per request. With this a request whose ``load_format`` is STREAM names the process
groups of all senders, and the scheduler does the rest: ``stream_buckets.py`` receives what the senders announce.

A request that fails leaves the process groups at once, which breaks them for all members: the others learn of the
failure as soon as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from miles_async.engines.sglang import STREAM
from miles_async.engines.sglang.hooks import hook
from miles_async.engines.sglang.stream_buckets import received
from miles_async.runtime.rank_records import gather_records

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class _FailedError(Exception):
    """SGLang refused an update, or could not load it."""


def register() -> None:
    """Let the schedulers made from now on take streams."""
    hook(f"{_UPDATER}.update_weights_from_distributed", _update)


def _update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    if request.load_format != STREAM:
        return update(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    names = request.group_name.split()
    message = _agreed(_receive(manager, names), manager.tp_cpu_group)
    if message is None:
        manager.record_weight_version_after_update(request.weight_version)
    return UpdateWeightsFromDistributedReqOutput(success=message is None, message=message or "received everything")


def _receive(manager: Any, names: Sequence[str]) -> str | None:
    """Receive and load all buckets as one update. Returns why that failed."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    begun = manager.begin_weight_update(BeginWeightUpdateReqInput())
    if not begun.success:
        return str(begun.message)
    with manager._observe_weight_load("distributed"):
        problem = _loaded(manager, names)
    manager._session = msgspec.structs.replace(manager._session, loaded_weights=True)
    manager.end_weight_update(EndWeightUpdateReqInput())
    return problem


def _loaded(manager: Any, names: Sequence[str]) -> str | None:
    """Receive and load all buckets. Returns why that failed, having left the process groups."""
    updater = manager.tp_worker.model_runner.weight_updater
    groups: list[dist.ProcessGroup] = []
    try:
        groups += [updater._model_update_group[name] for name in names]
        with closing(received(groups, torch.device(updater.device))) as buckets:
            for tensors in buckets:
                for _, runner in manager._select_runners():
                    success, message = runner.weight_updater.load_weights_from_distributed(tensors)
                    if not success:
                        raise _FailedError(message)
        return None
    except Exception as error:  # supervision point: whatever goes wrong is this engine's failure, not its end
        problem = f"{type(error).__name__}: {error}"
    groups.clear()
    for name in names:
        updater.destroy_weights_update_group(name)
    return problem


def _agreed(problem: str | None, group: Any) -> str | None:
    """The first problem of any of the engine's ranks: only the first rank answers."""
    problems = gather_records([] if problem is None else [problem], list[str], group)
    return next(chain.from_iterable(problems), None)
