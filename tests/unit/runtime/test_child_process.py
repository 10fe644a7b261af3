"""Ports, child processes, commands and the launcher's shims; nothing heavier than a python -c."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import ServerGroup
from miles_async.engines.kind import ServerSpec
from miles_async.engines.router import router_command
from miles_async.engines.sglang.server import EngineServer, server_command
from miles_async.errors import ConfigurationError, EngineStartError
from miles_async.runtime import addresses
from miles_async.runtime.addresses import LOOPBACK, HeldPort, node_host
from miles_async.runtime.child_process import ChildProcess
from miles_async.wiring.engines import server_spec

SPEC = ServerSpec(model_path="/models/m", device="cpu", dtype="float32")


def test_a_held_port_is_ours_until_released() -> None:
    with HeldPort(LOOPBACK) as port:
        stranger = socket.socket()
        with pytest.raises(OSError, match="in use"):
            stranger.bind((LOOPBACK, port.number))
        stranger.close()
    with socket.create_server((LOOPBACK, port.number)):
        pass


def test_a_server_can_listen_on_a_port_that_we_still_hold() -> None:
    """What lets us hold it until an engine is up; create_server sets SO_REUSEADDR as servers do."""
    with HeldPort(LOOPBACK) as port, socket.create_server((LOOPBACK, port.number)) as server:
        server.listen()


def test_held_ports_are_outside_the_ephemeral_range() -> None:
    with HeldPort(LOOPBACK) as port:
        assert port.number < addresses._ephemeral_start()


def test_a_wanted_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number} is not free"):
            HeldPort(LOOPBACK, number)


def test_addresses_for_other_machines_are_never_loopback() -> None:  # covers: A6
    assert node_host(single_node=True) == LOOPBACK
    with suppress(ConfigurationError):  # a sandbox without a network: refused, rather than localhost
        assert not socket.gethostbyname(node_host(single_node=False)).startswith("127.")


async def test_a_child_writes_to_its_file_with_our_interpreter(tmp_path: Path) -> None:  # covers: A7
    code = "import sys; print(sys.executable); print('oops', file=sys.stderr); sys.exit(3)"
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "logs" / "c.log", environment={})
    child.start()
    assert await child.wait() == 3
    assert sys.executable in child.tail()
    assert child.tail(1) in ("oops", sys.executable)
    assert "oops" in child.tail()


async def test_a_child_knows_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # covers: A6
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    code = "import urllib.request; print(urllib.request.getproxies())"
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    assert await child.wait() == 0
    assert child.tail(1) == "{}"


async def test_stop_reaps_grandchildren_that_ignore_sigterm(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        grandchild = subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
        print(grandchild.pid, flush=True)
        time.sleep(60)
    """)
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    grandchild = await _number_in(child)
    await child.stop(grace_seconds=0.3)
    assert child.returncode is not None
    await _until_gone(grandchild)


@pytest.mark.parametrize("died", [False, True])
async def test_stop_leaves_no_shared_memory(tmp_path: Path, died: bool) -> None:
    code = textwrap.dedent("""
        import mmap, multiprocessing, os, tempfile, time
        from multiprocessing import shared_memory
        mapped = tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False)  # of which Python's tracker knows nothing
        mapped.truncate(64)
        mapping = mmap.mmap(mapped.fileno(), 64)
        segment = shared_memory.SharedMemory(create=True, size=64)
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        names = mapped.name, segment.name, "sem." + semaphore._semlock.name.lstrip("/"), os.getpid()
        print(*names, sep=":", flush=True)
        time.sleep(60)
    """)
    child = ChildProcess("c", ["-c", code], log_path=tmp_path / "c.log", environment={})
    child.start()
    async with asyncio.timeout(20):
        while not child.tail(1).endswith(f":{child.pid}"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    files = [Path("/dev/shm") / name for name in child.tail(1).split(":")[:3]]
    assert all(file.exists() for file in files)
    if died:
        child.note_shared_memory()
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    await child.stop(grace_seconds=0)
    assert not any(file.exists() for file in files)


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import asyncio, time
        from pathlib import Path
        from miles_async.runtime.child_process import ChildProcess
        child = ChildProcess("c", ["-c", "import time; time.sleep(60)"],
                             log_path=Path({str(tmp_path)!r}) / "c.log", environment={{}})
        child.start()
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    parent = ChildProcess("p", ["-c", code], log_path=tmp_path / "p.log", environment={})
    parent.start()
    child_pid = await _number_in(parent)
    psutil.Process(parent.pid).send_signal(signal.SIGKILL)  # no chance to clean up
    await parent.wait()
    await _until_gone(child_pid)


async def _number_in(child: ChildProcess) -> int:
    async with asyncio.timeout(20):
        while not child.tail(1).isdigit():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return int(child.tail(1))


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_server_that_ends_early_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "miles_async.engines.sglang.server.server_command", lambda *_: ["-c", "raise SystemExit('no such model')"]
    )
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", log_dir=str(tmp_path))
    with pytest.raises(EngineStartError, match=r"ended with status 1(.|\n)*no such model"):
        await EngineServer(spec, 0, 0).start()


async def test_a_server_that_never_answers_is_ended_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "miles_async.engines.sglang.server.server_command",
        lambda *_: ["-c", "import time; print('loading', flush=True); time.sleep(60)"],
    )
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", log_dir=str(tmp_path), start_timeout=1.0)
    server = EngineServer(spec, 0, 0)
    with pytest.raises(EngineStartError, match=r"--engine-start-timeout(.|\n)*loading"):
        await server.start()
    assert not await server.alive()


def test_engines_know_grammars_where_agents_may_ask_for_them() -> None:
    with_grammars = ServerSpec(model_path="m", device="cpu", dtype="float32", grammars=True)
    assert "--grammar-backend=xgrammar" in server_command(with_grammars, LOOPBACK, 1, 2, 0)
    assert "--grammar-backend=none" in server_command(SPEC, LOOPBACK, 1, 2, 0)


def test_cpu_servers_get_what_runs_without_a_gpu_and_cuda_servers_do_not() -> None:
    cpu = server_command(SPEC, LOOPBACK, 1, 2, 0)
    assert "--attention-backend=torch_native" in cpu
    cuda = server_command(
        ServerSpec(model_path="m", device="cuda", dtype="bfloat16", tensor_parallel_size=4), "node7", 1, 2, 0
    )
    assert not any("attention-backend" in argument for argument in cuda)
    assert {"--tp-size=4", "--dtype=bfloat16", "--host=0.0.0.0"} <= set(cuda)


def test_engines_that_get_publications_start_with_random_weights_and_a_draft_model_with_its_own() -> None:
    # covers: C8
    dummy = ServerSpec(model_path="m", device="cpu", dtype="float32", dummy_weights=True)
    expected = {"--load-format=dummy", "--speculative-draft-load-format=auto"}
    assert expected <= set(server_command(dummy, LOOPBACK, 1, 2, 0))
    assert not expected & set(server_command(SPEC, LOOPBACK, 1, 2, 0))


@pytest.mark.parametrize(("role", "published"), [("train", True), ("evaluation", True), ("frozen", False)])
def test_only_frozen_engines_start_with_the_weights_of_their_checkpoint(
    role: Any, published: bool, tmp_path: Path
) -> None:
    # covers: C8
    spec = server_spec(Arguments(), ServerGroup(name="group", role=role), tmp_path, "cpu")
    assert (spec.dummy_weights, spec.held_weights) == (published, published)


async def test_a_server_leaves_no_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes in the temporary directory, SGLang's sockets for instance, goes with it."""
    program = "import tempfile; [tempfile.NamedTemporaryFile(delete=False) for _ in range(5)]; raise SystemExit('done')"
    monkeypatch.setattr("miles_async.engines.sglang.server.server_command", lambda *_: ["-c", program])
    monkeypatch.setattr("miles_async.engines.sglang.server.temporary_parent", lambda: tmp_path / "tmp")
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", log_dir=str(tmp_path))
    with pytest.raises(EngineStartError, match="done"):
        await EngineServer(spec, 0, 0).start()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_users_own_arguments_come_last() -> None:
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", extra=("--max-running-requests=7",))
    assert server_command(spec, LOOPBACK, 1, 2, 0)[-1] == "--max-running-requests=7"
    assert router_command(LOOPBACK, 1, 2, "random", ("--log-level=info",))[-1] == "--log-level=info"


def test_absent_packages_can_be_mentioned_and_not_used() -> None:
    code = textwrap.dedent("""
        from miles_async.engines.sglang.absent_modules import allow_mentioning, is_absent
        assert is_absent("no_such_package") and not is_absent("json")
        allow_mentioning("no_such_package", {"__version__": "1", "deep.value": 7})
        import no_such_package as p, no_such_package.language as language
        from no_such_package.deep import value
        assert p.__version__ == "1" and value == 7
        @p.jit
        def kernel(x: language.constexpr): ...
        class Derived(p.Base): ...
        try:
            p.run(1)
        except NotImplementedError as error:
            assert "no_such_package.run" in str(error)
        else:
            raise AssertionError
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
