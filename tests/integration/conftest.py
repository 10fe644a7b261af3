"""Processes that a whole session of integration tests shares: servers, ranks and runs are forked from them."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.runtime.environment import worker_environment
from miles_async.runtime.network.process_group_errors import BLOCKING_WAIT
from miles_async.runtime.processes.fork_server_process import READ_LATE, ForkServer, ForkServers
from miles_async.wiring.early_imports import COMMON
from miles_async.wiring.fork_servers import RunForkServers, fork_servers
from tests.integration import imported_run
from tests.integration.imported_server import ROOM_FOR_MARKS
from tests.integration.real_run import QUICKSTART, TRAIN_REVERSE
from tests.integration.served_models import declare_plugins

# Tests, Ray's workers and what tests import set these, and imports of SGLang and Megatron don't read them. Where a test
# has a trainer in its own process, BLOCKING_WAIT is set while that joins a group, when an engine may just start again.
LATE = (
    rf"{READ_LATE}|(?i:\w+_proxy)|PYTEST_.*|NVTE_.*|{BLOCKING_WAIT}"
    r"|TOKENIZERS_PARALLELISM|TORCHINDUCTOR_CACHE_DIR|SGLANG_CPU_OMP_THREADS_BIND|SGLANG_MAMBA_CONV_DTYPE|WANDB_SERVICE"
    r"|COLUMNS|LINES"
)

Imported = tuple[RunForkServers, ForkServer]
SHARED = pytest.StashKey[bytes]()
FORK_SERVERS = "fork servers"  # pickled, in the input of pytest-xdist's workers

# Files that take half a minute or more: the workers of `make test` end together if these come first.
LONGEST = (
    *("test_megatron_layouts", "test_run", "test_memory_plan", "test_publication_faults", "test_trainer_ranks"),
    *("test_kill", "test_engines_real", "test_weights_real", "test_megatron_resharding", "test_vision_models"),
    *("test_placement", "test_on_policy_reference", "test_megatron_checkpoints", "test_session_service"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, the others in their order."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@contextmanager
def running_fork_servers() -> Iterator[Imported]:
    """The fork servers of a run of the quick start, and one with what they have in common. Their SGLang finds the
    plugins of tests.
    """
    with tempfile.TemporaryDirectory() as name:  # sockets have short paths
        directory = Path(name)
        declare_plugins(directory, ("tests.integration.deaf_engine", "tests.integration.rounded_engine"))
        environment = worker_environment((), cpu=True)
        environment["PYTHONPATH"] = os.pathsep.join([name, environment["PYTHONPATH"]])
        processes = ForkServers(COMMON, environment | ROOM_FOR_MARKS)
        processes.start()
        arguments = parse_arguments([f"@{QUICKSTART}/reverse.args"]).arguments
        described = fork_servers(arguments, directory, "cpu", directory, environment)
        servers = RunForkServers(**{server.path.name: replace(server, late=LATE) for server in described})
        common = ForkServer(
            path=directory / "common",
            modules=(),
            environment=environment,
            log_path=directory / "logs" / "common_imports.log",
            late=LATE,
        )
        processes.fork((*servers, common))
        try:
            yield servers, common
        finally:
            asyncio.run(processes.stop())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist calls this before it starts a worker: all workers share the fork servers of this process."""
    if SHARED not in node.config.stash:
        servers = ExitStack()
        node.config.stash[SHARED] = pickle.dumps(servers.enter_context(running_fork_servers()))
        node.config.add_cleanup(servers.close)
    node.workerinput[FORK_SERVERS] = node.config.stash[SHARED]


@pytest.fixture(scope="session")
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    """The fork servers that all workers share; without workers, those of this process."""
    shared = getattr(request.config, "workerinput", {}).get(FORK_SERVERS)
    with nullcontext(pickle.loads(shared)) if shared else running_fork_servers() as (servers, common):
        yield servers, common
    logs = (log for log in tmp_path_factory.getbasetemp().rglob("*.log") if log.is_file())
    lines = ((log.name, line) for log in logs for line in log.read_text(errors="replace").splitlines())
    place = f"the fork server at {common.path.parent}/"
    refused = [(log, line) for log, line in lines if place in line and "it refuses" in line]
    assert not refused, f"these had to import everything themselves, which takes 10 s: {refused}"


@pytest.fixture(scope="session")
def common_imports(imported: Imported) -> ForkServer:
    """A process that has imported torch and transformers."""
    return imported[1]


@pytest.fixture(scope="session")
def sglang_imports(imported: Imported) -> ForkServer:
    """A process that has imported SGLang."""
    assert imported[0].engines is not None
    return imported[0].engines


@pytest.fixture(scope="session")
def engine_imports(sglang_imports: ForkServer) -> Path:
    """Its socket, for ``ServerSpec.fork_server``."""
    return sglang_imports.path


@pytest.fixture(scope="session")
def rank_imports(imported: Imported) -> ForkServer:
    """A process that has imported Megatron, to fork a trainer's Ray workers from."""
    assert imported[0].ranks is not None
    return imported[0].ranks


@pytest.fixture(scope="session")
def imported_reverse(engine_imports: Path) -> tuple[str, ...]:
    """``REVERSE`` without imports of engines, ranks and actors, for tests about what a run does when it has started."""
    return (sys.executable, "-m", imported_run.__name__, str(engine_imports.parent), *TRAIN_REVERSE)
