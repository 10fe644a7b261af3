"""In the server's process: a scheduler that is paused sleeps until the next request.

SGLang (0.5.23) lets idle schedulers sleep (``--sleep-on-idle``). A paused one looks for requests without end, which
takes a core from whoever sends the weights it is paused for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PAUSED_TURN = "_record_scheduler_state_for_paused_engine"
"""The method of the scheduler that is all it does in a turn of its loop while it is paused."""


@cache  # a server that is forked from a process which has imported the launcher imports it again
def register() -> None:
    """Make schedulers created from now on sleep while they are paused."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.managers.scheduler.Scheduler.{PAUSED_TURN}", _sleep, HookType.AFTER)


def _sleep(_: None, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()
