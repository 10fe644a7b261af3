"""In the server's process: small changes of SGLang (0.5.23) and of torch (2.13), each made by a function."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from miles_async.engines.sglang import WEIGHT_GROUP_SECONDS_VARIABLE
from miles_async.engines.sglang.hooks import hook
from miles_async.runtime.network.ports import bind_held_port
from miles_async.runtime.network.process_group_errors import errors_are_raised

PAUSED_TURN = "_record_scheduler_state_for_paused_engine"
"""The only method that a paused scheduler calls per turn of its loop."""
SELECT_RUNNERS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._select_runners"
CACHE_SCALES = "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod"
GROUP_MAKER = "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group"


def move_load_file() -> None:
    """Put SGLang's load-sharing file into the server's temporary directory, which is removed with the server.

    SGLang has it in /dev/shm under a random name and never removes it.
    """
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda instance: str(Path(tempfile.gettempdir()) / f"load_{instance}")


def narrow_rank_store() -> None:
    """Have the store at which the server's ranks meet listen at its address only.

    torch has the store of ``tcp://`` listen on all interfaces, and it asks for no key.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
    rendezvous.TCPStore = _listening_at_its_address


def _listening_at_its_address(*, host_name: str, port: int, is_master: bool, **options: Any) -> TCPStore:
    if is_master:
        options["master_listen_fd"] = bind_held_port(host_name, port).detach()
    return TCPStore(host_name=host_name, port=port, is_master=is_master, **options)


def sleep_while_paused() -> None:
    """Make schedulers sleep until the next request while they are paused, as idle ones do (``--sleep-on-idle``).

    SGLang's poll for requests without pause, which takes a core from the sender of the weights.
    """
    hook(f"sglang.srt.managers.scheduler.Scheduler.{PAUSED_TURN}", _sleep, "AFTER")


def _sleep(_: None, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()


def have_no_cache_scales() -> None:
    """Leave the scales of a quantized model's KV cache at 1: a dummy load draws them, and no publication has any."""
    hook(f"{CACHE_SCALES}.process_weights_after_loading", without_cache_scales)


def without_cache_scales(process: Callable[..., None], method: Any, layer: Any) -> None:
    """``process(...)`` of a layer of attention whose scales were in no checkpoint."""
    for scale in (layer.k_scale, layer.v_scale):
        scale.data.fill_(-1.0)
    process(method, layer)


def limit_weight_groups() -> None:
    """Give the process groups that weights come by a deadline, read from the environment when one is made.

    SGLang makes them with torch's deadlines, 10 or 30 minutes, and errors of NCCL end the process: a member that hangs
    would keep all others waiting, and one that dies would end them. With this, a broken group is an error of the
    request that was being served (``runtime/network/process_group_errors.py``).
    """
    hook(GROUP_MAKER, with_deadline)


def with_deadline(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``make(...)``, whose group has the deadline."""
    seconds = float(os.environ[WEIGHT_GROUP_SECONDS_VARIABLE])
    with errors_are_raised():
        return make(*args, **{"timeout": timedelta(seconds=seconds), **kwargs})


def keep_draft_models() -> None:
    """Let weights go to the model that is served alone: by default SGLang loads them into a draft model, too.

    A draft model with layers of its own cannot take them. Drafts that share parameters with the model follow it.
    """
    hook(SELECT_RUNNERS, targets)


def targets(select: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    """Roles and runners of ``select(...)`` without draft models."""
    return [(role, runner) for role, runner in select(*args, **kwargs) if role == "target"]
