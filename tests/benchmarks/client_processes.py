"""Client processes for a benchmark, and what they cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from miles_async.engines.posting.processes import ClientProcesses, client_process


@asynccontextmanager
async def client_processes(count: int) -> AsyncIterator[ClientProcesses]:
    """Run as many processes during the context; one that dies is missed."""
    with TemporaryDirectory() as logs:
        launch = client_process("/generate", Path(logs), None, None)
        clients = ClientProcesses(count, launch, max_restarts=0, restart_window=1.0)
        try:
            await clients.start()
            yield clients
        finally:
            await clients.stop()


def cpu_seconds(clients: ClientProcesses) -> float:
    """CPU seconds of all processes so far."""
    return sum(sum(psutil.Process(process.child.pid).cpu_times()[:2]) for process in clients.processes)
