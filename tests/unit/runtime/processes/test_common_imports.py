"""Fork servers that are forked themselves, from a process that has imported what they have in common."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.fork_server_process import ForkServer, running
from tests.unit.runtime.processes.waiting import until_gone

MODULES = {
    "common": """
        import os
        with open(os.environ["COUNTED"], "a") as file:
            file.write("common\\n")
        os.environ["SET_BY_COMMON"] = "yes"
    """,
    "own": "import common",
    "broken": "raise ImportError('nothing here')",
    "report": """
        import os, own, sys
        print(os.environ["WHO"], os.environ["SET_BY_COMMON"], os.environ.get("TMPDIR"), "extra" in sys.path, flush=True)
    """,
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))


def server(tmp_path: Path, name: str, environment: Mapping[str, str]) -> ForkServer:
    return ForkServer(
        path=tmp_path / name,
        modules=("own",),
        environment=environment,
        log_path=tmp_path / "logs" / f"{name}.log",
        late="PYTEST_CURRENT_TEST|TMPDIR|PYTHONPATH",
        own="WHO|PYTEST_CURRENT_TEST",
    )


async def report(server: ForkServer, environment: Mapping[str, str]) -> str:
    """Last line of a child with this environment."""
    child = ChildProcess("c", ["-m", "report"], log_path=server.path.with_suffix(".child"), environment=environment)
    await child.fork(server.path)
    assert await child.wait() == 0, child.tail()
    assert "imports everything itself" not in child.tail()
    return child.tail(1)


async def test_what_servers_have_in_common_is_imported_once(tmp_path: Path) -> None:
    one, other = (server(tmp_path, name, {"WHO": name}) for name in ("one", "other"))
    async with running(one, other, modules=["common"]):
        assert await report(one, {"WHO": "one", "TMPDIR": "/tmp"}) == "one yes /tmp False"
        path = os.pathsep.join([os.environ["PYTHONPATH"], "extra"])
        assert (await report(other, {"WHO": "other", "PYTHONPATH": path})).endswith("True")
    assert (tmp_path / "counted").read_text() == "common\n"


async def test_whoever_was_forked_from_one_server_may_ask_another(tmp_path: Path) -> None:
    """It has the variables that common imports have set."""
    one = server(tmp_path, "one", {"WHO": "one"})
    async with running(one, modules=["common"]):
        assert (await report(one, {"WHO": "one", "SET_BY_COMMON": "yes"})).startswith("one yes")


async def test_a_server_that_imports_in_another_environment_is_a_new_interpreter(tmp_path: Path) -> None:
    one = server(tmp_path, "one", {"WHO": "one", "OMP_NUM_THREADS": "17"})
    async with running(one, modules=["common"]):
        assert (await report(one, {"WHO": "one", "OMP_NUM_THREADS": "17"})).startswith("one yes")
    assert "it imports everything itself: imports have seen other values of OMP_NUM_THREADS" in one.log_path.read_text()
    assert (tmp_path / "counted").read_text() == "common\ncommon\n"


async def test_a_common_module_that_cannot_be_imported_is_left_to_those_who_need_it(tmp_path: Path) -> None:
    one = server(tmp_path, "one", {"WHO": "one"})
    async with running(one, modules=["broken", "common"]):
        assert (await report(one, {"WHO": "one"})).startswith("one yes")


async def test_servers_end_with_the_process_that_they_were_forked_from(tmp_path: Path) -> None:
    # covers: C10
    one = server(tmp_path, "one", {"WHO": "one"})
    async with running(one, modules=["common"]) as processes:
        await report(one, {"WHO": "one"})
        [forked] = psutil.Process(processes.pid).children()
        os.kill(processes.pid, signal.SIGKILL)
        await until_gone(forked.pid)


async def test_without_servers_it_ends_when_it_has_imported(tmp_path: Path) -> None:
    async with running(modules=["common"]) as processes:
        await until_gone(processes.pid)
    assert (tmp_path / "counted").read_text() == "common\n"
