"""Lines for ``stall.txt``: which tasks of a stalled run wait where (C10)."""

from __future__ import annotations

import asyncio
from pathlib import Path

MAX_TASKS = 50
_MACHINERY = Path(__file__).parent


def waiting_tasks() -> list[str]:
    """List the tasks of the running loop: name, and the project's innermost call it waits in; most frequent first."""
    counts: dict[str, int] = {}
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            line = f"{_name(task)}: {_where(task)}"
            counts[line] = counts.get(line, 0) + 1
    lines = [f"{count} × {line}" for line, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return lines if len(lines) <= MAX_TASKS else [*lines[:MAX_TASKS], f"and {len(lines) - MAX_TASKS} more"]


def _name(task: asyncio.Task[object]) -> str:
    name = task.get_name()
    return "task" if name.startswith("Task-") else name  # asyncio numbers tasks without a name


def _where(task: asyncio.Task[object]) -> str:
    """The innermost frame of this project but for its machinery, through coroutines that await each other."""
    found = "nothing of ours"
    waiting: object = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None)
        if frame is not None:
            file = Path(frame.f_code.co_filename)
            if "miles_async" in str(file) and file.parent != _MACHINERY:
                found = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        waiting = getattr(waiting, "cr_await", None)
    return found
