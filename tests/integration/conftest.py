"""Processes that a whole session of integration tests shares."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_async.engines.kind import ServerSpec
from miles_async.engines.sglang.kind import SGLANG
from miles_async.runtime.processes import fork_server, forked_worker
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.fork_server_process import READ_LATE
from miles_async.runtime.processes.forking import listen
from miles_async.trainer.placement import RankResources
from tests.integration.served_models import declare_plugins

# Tests, Ray's workers and what tests import set these, and imports of SGLang and Megatron don't read them.
LATE = (
    rf"{READ_LATE}|(?i:\w+_proxy)|PYTHONPATH|PYTEST_.*|NVTE_.*"
    r"|TOKENIZERS_PARALLELISM|TORCHINDUCTOR_CACHE_DIR|SGLANG_CPU_OMP_THREADS_BIND|WANDB_SERVICE"
)
ROOM_FOR_TITLES = " " * 600  # processes that are forked write theirs over the arguments of the first


@dataclass(frozen=True)
class Imported:
    """A process that has imported something and forks others (``fork_server.py``)."""

    path: Path  # of its socket

    def interpreter(self, title: str) -> str:
        """Command of an interpreter that it forks, for Ray. ``title``: name of its process."""
        return shlex.join([sys.executable, "-I", "-S", forked_worker.__file__, str(self.path), title])


@contextmanager
def imported(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[Imported]:
    """``environment``: what imports are to see, beyond ours."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "socket"  # sockets have short paths
        with listen(path) as listener:
            command = ["-m", fork_server.__name__, str(listener.fileno()), LATE, *modules, ROOM_FOR_TITLES]
            process = ChildProcess(
                "imported",
                command,
                log_path=path.with_name("log"),
                environment={**environment, fork_server.TITLE_VARIABLE: "1"},
                descriptors=[listener.fileno()],
            )
            process.start()
        try:
            yield Imported(path)
        finally:
            asyncio.run(process.stop(grace_seconds=0))


@pytest.fixture(scope="session")
def engine_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a process that has imported SGLang, for ``ServerSpec.fork_server``. It finds the plugins of tests."""
    plugins = tmp_path_factory.mktemp("plugins")
    declare_plugins(plugins, ("tests.integration.deaf_engine", "tests.integration.rounded_engine"))
    path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
    environment = SGLANG.environment(ServerSpec(model_path=str(plugins), device="cpu", dtype="float32"))
    with imported(SGLANG.imports, {**environment, "PYTHONPATH": path}) as server:
        yield server.path
    logs = (log for log in tmp_path_factory.getbasetemp().rglob("*.log") if log.is_file())
    refused = [log for log in logs if f"the fork server at {server.path} refuses" in log.read_text(errors="replace")]
    assert not refused, f"these imported SGLang themselves, which takes 10 s; they say why: {refused}"


@pytest.fixture(scope="session")
def rank_imports() -> Iterator[Imported]:
    """A process that has imported Megatron, to fork a trainer's Ray workers from."""
    modules = ("miles_async.backends.megatron.imports", "miles_async.weights.staging")
    with imported(modules, RankResources.for_device("cpu", {}).env) as server:
        yield server
