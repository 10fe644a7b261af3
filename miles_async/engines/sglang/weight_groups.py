"""In the server's process: the engine's end of the process groups that weights come by.

SGLang (0.5.23) makes them with torch's own deadlines, 10 or 30 minutes, and errors of NCCL end the process. A member
that hangs would keep all others waiting, and one that dies would end them. With this they have a deadline, and a broken
group is an error of the request that was being served (``runtime/network/process_group_errors.py``).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

from miles_async.engines.sglang.names import WEIGHT_GROUP_SECONDS_VARIABLE
from miles_async.runtime.network.process_group_errors import errors_are_raised

_MAKER = "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group"


def register() -> None:
    """Give a deadline, read from the environment, to all groups made from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_MAKER, _with_deadline, HookType.AROUND)


def _with_deadline(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seconds = float(os.environ[WEIGHT_GROUP_SECONDS_VARIABLE])
    with errors_are_raised():
        return make(*args, **{"timeout": datetime.timedelta(seconds=seconds), **kwargs})
