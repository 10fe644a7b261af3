"""Processes forked from one that has imported what they need, and how all of them end."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import textwrap
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from miles_async.runtime.processes import forking
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.fork_server_process import ForkServer, running
from miles_async.runtime.processes.forking import ForkedProcess
from tests.unit.runtime.processes.waiting import environment_of, number_in, until_gone
from tests.waiting import until

LATE = "LATE|PYTEST_CURRENT_TEST"
HEAVY = """
    import os
    print("imported", flush=True)
    os.environ["SET_BY_IMPORT"] = "yes"
"""
REPORT = """
    import heavy, os, sys, tempfile
    print(sys.argv[1:], os.environ["LATE"], os.environ["SET_BY_IMPORT"], tempfile.gettempdir(), flush=True)
    print(os.getcwd(), os.getpid() == os.getpgrp() == os.getsid(0), __name__, flush=True)
    sys.exit(3)
"""
WAIT = """
    import heavy, subprocess, sys, time
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(grandchild.pid, flush=True)
    time.sleep(60)
"""
ASK = """
    import asyncio, sys, time
    from pathlib import Path
    from miles_async.runtime.processes.child_process import ChildProcess
    async def ask():
        child = ChildProcess("c", ["-m", "wait"], log_path=Path(sys.argv[2]), environment={})
        await child.fork(Path(sys.argv[1]))
        print(child.pid, flush=True)
        await asyncio.sleep(60)
    asyncio.run(ask())
"""


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    for name, text in {"heavy": HEAVY, "report": REPORT, "wait": WAIT, "ask": ASK}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = ForkServer(
        path=tmp_path / "socket", modules=("heavy",), late=LATE, log_path=tmp_path / "server.log", environment={}
    )
    async with running(server):
        yield server


def pid_of(server: ForkServer) -> int:
    parents = psutil.Process().children()  # those that servers are forked from
    servers = [each for parent in parents for each in parent.children()]
    title = f"fork server {server.path.name} "
    [pid] = [each.pid for each in servers if " ".join(each.cmdline()).startswith(title)]
    return pid


def child(
    server: ForkServer, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> ChildProcess:
    command = ["-m", module, *arguments]
    return ChildProcess(
        name, command, log_path=server.path.parent / f"{name}.log", environment=environment or {"LATE": name}
    )


async def test_children_have_their_own_arguments_environment_and_output(server: ForkServer) -> None:
    # covers: C7
    folder = server.path.parent
    (folder / "tmp").mkdir()
    children = [child(server, name, "report", "an argument", name) for name in ("first", "second")]
    for each in children:
        await each.fork(server.path)
        assert await each.wait() == 3
        assert f"['an argument', '{each.name}'] {each.name} yes /tmp" in each.tail()
        assert each.tail(1) == f"{Path.cwd()} True __main__"
        assert "imported" not in each.tail()
    assert (folder / "server.log").read_text().count("imported") == 1


async def test_temporary_files_go_where_the_child_is_told(server: ForkServer) -> None:
    early = ForkServer(
        path=server.path.with_name("early"),
        modules=("tempfile", "heavy"),
        late="LATE|TMPDIR",
        log_path=server.path.with_name("early.log"),
        environment={},
    )
    async with running(early):
        one = child(early, "one", "report", environment={"LATE": "", "TMPDIR": str(server.path.parent)})
        await one.fork(early.path)
        await one.wait()
    assert str(server.path.parent) in one.tail(2)


async def test_a_child_is_found_by_command_and_environment(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes of a run are, whichever way they started."""
    one = child(server, "one", "wait", "--an-option=x")
    await one.fork(server.path)
    grandchild = await number_in(one)
    process = psutil.Process(one.pid)
    assert process.cmdline()[0].rstrip().endswith("-m wait --an-option=x")
    assert process.environ()["PYTHONPATH"] == environment_of(psutil.Process(grandchild))["PYTHONPATH"]
    await one.stop(grace_seconds=0)
    assert one.returncode == -signal.SIGKILL
    await until_gone(grandchild)


async def test_a_child_dies_with_the_process_that_asked_for_it(server: ForkServer) -> None:
    # covers: C10
    asking = child(server, "asking", "ask", str(server.path), str(server.path.parent / "asked.log"))
    asking.start()
    asked = await number_in(asking)
    await until(psutil.Process(asked).children)
    children = psutil.Process(asked).children()
    os.kill(asking.pid, signal.SIGKILL)  # no chance to clean up
    for pid in (asked, *(process.pid for process in children)):
        await until_gone(pid)
    assert await asking.wait() == -signal.SIGKILL


async def test_a_child_dies_with_the_server_and_the_next_starts_by_itself(server: ForkServer) -> None:
    one = child(server, "one", "wait")
    await one.fork(server.path)
    os.kill(psutil.Process(one.pid).ppid(), signal.SIGKILL)
    async with asyncio.timeout(10):
        assert await one.wait() == -signal.SIGKILL
    await until_gone(one.pid)
    other = child(server, "other", "report")
    await other.fork(server.path)
    assert await other.wait() == 3
    assert "it imports everything itself: the fork server at" in other.tail()
    assert "imported" in other.tail().splitlines()


async def test_a_child_and_whoever_asked_for_it_may_end_at_once(server: ForkServer) -> None:
    for number in range(3):
        one = child(server, "one", "wait")
        await one.fork(server.path)
        os.kill(pid_of(server), signal.SIGSTOP)  # it sees both ends together
        os.kill(one.pid, signal.SIGKILL)
        await until_gone(one.pid)
        assert isinstance(one._process, ForkedProcess)
        one._process._connection.close()
        os.kill(pid_of(server), signal.SIGCONT)
        assert psutil.Process(pid_of(server)).is_running(), number
    other = child(server, "other", "report")
    await other.fork(server.path)
    assert await other.wait() == 3
    assert "imports everything itself" not in other.tail()


async def test_a_child_cannot_change_variables_that_imports_have_read(server: ForkServer) -> None:
    one = child(server, "one", "report", environment={"LATE": "x", "OMP_NUM_THREADS": "17"})
    await one.fork(server.path)
    assert await one.wait() == 3
    assert "refuses: imports have seen other values of OMP_NUM_THREADS" in one.tail()
    assert "imported" in one.tail().splitlines()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("raise ImportError('nothing here')", "does not answer"),
    ],
)
async def test_a_server_that_cannot_fork_says_so(server: ForkServer, text: str, reason: str) -> None:
    (server.path.parent / "unusable.py").write_text(text)
    unusable = ForkServer(
        path=server.path.with_name("unusable"),
        modules=("unusable",),
        late=LATE,
        log_path=server.path.with_name("unusable.log"),
        environment={},
    )
    async with running(unusable):
        one = child(unusable, "one", "report")
        await one.fork(unusable.path)
        assert await one.wait() == 3
    assert reason in one.tail()


async def test_a_process_that_waits_too_long_for_imports_starts_by_itself(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C10
    monkeypatch.setattr(forking, "IMPORTS_SECONDS", 0.5)
    (server.path.parent / "hanging.py").write_text("import time; time.sleep(60)")
    hanging = replace(server, path=server.path.with_name("hanging"), modules=("hanging",))
    async with running(hanging):
        one = child(hanging, "one", "report")
        async with asyncio.timeout(20):
            await one.fork(hanging.path)
        assert await one.wait() == 3
    assert "has imported for 0.5 s" in one.tail()
    assert "imported" in one.tail().splitlines()


async def test_an_interpreter_for_ray_forks_a_script(server: ForkServer) -> None:
    """``py_executable`` of a runtime environment: a command that takes the place of python."""
    script = server.path.parent / "report.py"
    process = await _interpreted(server, str(script), "an argument")
    output, _ = await process.communicate()
    assert process.returncode == 3
    assert output.decode().startswith("['an argument'] x yes ")
    assert "imported" not in output.decode()


async def test_the_forked_script_ends_with_its_interpreter(server: ForkServer) -> None:
    # covers: C10
    process = await _interpreted(server, str(server.path.parent / "wait.py"))
    grandchild = int(await process.stdout.readline())
    assert psutil.Process(psutil.Process(grandchild).ppid()).cmdline()[0].rstrip() == "a title"
    process.kill()
    await process.wait()
    await until_gone(grandchild)


async def test_an_interpreter_without_a_server_is_python(server: ForkServer) -> None:
    absent = replace(server, path=server.path.with_name("absent"))
    process = await _interpreted(absent, str(server.path.parent / "report.py"))
    output, _ = await process.communicate()
    assert process.returncode == 3
    assert output.decode().startswith("imported\n")


async def _interpreted(server: ForkServer, *arguments: str) -> asyncio.subprocess.Process:
    path = [str(Path(__file__).parents[4]), *filter(None, os.environ["PYTHONPATH"].split(os.pathsep))]
    return await asyncio.create_subprocess_exec(
        *shlex.split(server.interpreter("a title")),
        *arguments,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "LATE": "x"},
        stdout=asyncio.subprocess.PIPE,
    )
