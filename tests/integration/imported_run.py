"""``miles-async`` with fork servers that are forked from the session's (``conftest.py``) and so need not import.

    python -m tests.integration.imported_run SOCKETS train ...

SOCKETS is the directory with the session's sockets, which have the names of the run's. With ``--max-run-restarts`` each
life of the run is started so.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from miles_async.cli import main
from miles_async.runs import keep_running
from miles_async.runtime.processes import forking
from miles_async.runtime.processes.child_process import ChildProcess, child_environment
from miles_async.runtime.processes.fork_server_process import ForkServer
from miles_async.runtime.tasks import gathered
from miles_async.wiring import early_imports
from tests.integration import imported_server

START_SECONDS = 150.0  # the session's imports included


class Forked(ChildProcess):
    def start(self) -> None:
        raise AssertionError(f"it should have been forked:\n{self.tail()}")


class ImportedServers:
    """Has the interface of ``ForkServers``, and of what those do nothing but fork."""

    session: Path  # directory of sockets

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._processes: list[ChildProcess] = []

    def start(self) -> None:
        """The session's have started."""

    def fork(self, servers: Iterable[ForkServer]) -> None:
        for server in servers:
            environment = server.path.with_suffix(".json")
            environment.write_text(json.dumps(child_environment(server.environment)))
            words = (str(server.path), str(environment), server.late, *server.modules)
            process = Forked(
                server.path.name,
                ["-m", imported_server.__name__, *words],
                log_path=server.log_path,
                environment=server.environment,
            )
            with ThreadPoolExecutor(1) as thread:  # this one has a loop that runs
                thread.submit(asyncio.run, process.fork(self.session / server.path.name)).result(START_SECONDS)
            self._processes.append(process)
            deadline = time.monotonic() + START_SECONDS
            while not server.path.exists():
                assert process.returncode is None, process.tail()
                assert time.monotonic() < deadline, process.tail()
                time.sleep(0.01)

    async def stop(self) -> None:
        """End all of them and their children, at once."""
        await gathered(*(process.stop(grace_seconds=0) for process in self._processes))


class RunKeeper(keep_running.RunKeeper):
    """Its lives are imported runs."""

    def __init__(self, command: Sequence[str], *rest: Any) -> None:
        interpreter, *program = command[:3]
        assert program == ["-m", "miles_async"], "the user's command"
        ours = (interpreter, "-m", "tests.integration.imported_run", str(ImportedServers.session))
        super().__init__((*ours, *command[3:]), *rest)


if __name__ == "__main__":
    ImportedServers.session = Path(sys.argv[1])
    keep_running.RunKeeper = RunKeeper  # type: ignore[misc]
    early_imports.ForkServers = ImportedServers  # type: ignore[assignment, misc]
    forking.IMPORTS_SECONDS = START_SECONDS  # nothing is to import by itself, however busy the machine
    sys.argv[:2] = ["miles-async"]
    sys.exit(main())
