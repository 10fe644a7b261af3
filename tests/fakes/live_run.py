"""The control socket of a live run whose driver is this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from miles_async.errors import ConfigurationError
from miles_async.runtime.network.control import ControlServer
from miles_async.runtime.processes.run_process import MARK, note_run_process


@contextmanager
def live_run(run_dir: Path) -> Iterator[list[dict[str, str]]]:
    """Answers ``set`` and ``settings`` as of a live run; yields the changes so far. It refuses all names but ``lr``."""
    changes: list[dict[str, str]] = []

    async def change(changes_asked: dict[str, str]) -> str:
        if changes_asked.keys() != {"lr"}:
            raise ConfigurationError(f"there is no setting {', '.join(changes_asked)}")
        changes.append(changes_asked)
        return f"lr 1e-06 → {changes_asked['lr']}, after step 7"

    async def settings() -> str:
        return "\n".join([f"lr {(changes or [{'lr': '1e-06'}])[-1]['lr']}", "generation running"])

    async def serve() -> None:
        handlers = {"set": lambda changes: change(changes), "settings": settings}
        async with ControlServer(run_dir / "control", handlers):
            ready.set()
            await asyncio.to_thread(over.wait)

    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    with mock.patch.dict(os.environ, {MARK: "mark"}):
        note_run_process(run_dir, run_dir / "control")
        thread.start()
        try:
            assert ready.wait(10)
            yield changes
        finally:
            over.set()
            thread.join(10)
