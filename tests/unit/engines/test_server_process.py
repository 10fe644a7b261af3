"""Supervision of a server's process, whatever kind of server it is."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest

from miles_async.engines.http import Http
from miles_async.engines.kind import EngineKind, ServerSpec
from miles_async.engines.server_process import ServerProcess, fork_server_of
from miles_async.engines.sglang.api import SGLangServer
from miles_async.errors import ConfigurationError, EngineError, EngineStartError
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.processes.fork_server_process import running as process_running
from miles_async.weights.files import bucket_file
from miles_async.weights.transports import host_files


def command(spec: ServerSpec, host: str, port: int, rendezvous: tuple[str, int], seed: int, node: int) -> list[str]:
    return ["-m", "http.server", str(port), f"--bind={host}", f"--directory={spec.model_path}"]


async def is_up(http: Http, url: str) -> bool:
    try:
        async with http.session.get(f"{url}/made") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


FILES = EngineKind(
    name="file server",
    command=command,
    environment=lambda spec: {"SEEN_BY_IMPORTS": spec.group, "MILES_ASYNC_SEEN_LATER": "1"},
    is_up=is_up,
    calls=SGLangServer,
)
"""A kind of server with nothing of SGLang."""


def running(program: str) -> EngineKind:
    return replace(FILES, command=lambda *_: ["-c", program])  # type: ignore[misc]


@pytest.fixture
def spec(tmp_path: Path) -> ServerSpec:
    return ServerSpec(model_path=str(tmp_path), device="cpu", dtype="float32", log_dir=str(tmp_path), start_timeout=20)


async def test_any_server_is_started_watched_and_ended(spec: ServerSpec) -> None:
    (Path(spec.model_path) / "made").touch()
    server = ServerProcess(FILES, spec, 1, 0)
    url = await server.start()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/made") as response:
        assert response.status == 200
    process = psutil.Process(await server.pid())
    environment = process.environ()
    temporary = Path(environment["TMPDIR"])
    assert environment["SEEN_BY_IMPORTS"] == "engine"
    assert await server.on_host(Path.is_dir, 1)

    process.kill()
    report = await server.wait_exit()
    assert re.search(r"engine-1 \(file server, model .* ended with status -9(.|\n)*GET /made", report)
    await server.stop()
    assert not await asyncio.to_thread(temporary.exists)


async def test_the_ranks_port_is_not_the_nodes_either(spec: ServerSpec) -> None:
    """The store of ranks that meet on loopback listens at every address of the node."""
    with HeldPort("127.0.0.1") as free:
        port = free.number
    ports = range(port, port + 1)
    server = ServerProcess(FILES, msgspec.structs.replace(spec, network=Network(ports=ports)), 0, 0)
    assert await server.open_rendezvous() == ("127.0.0.1", port)
    with pytest.raises(ConfigurationError, match="free"):
        HeldPort("127.0.0.2", ports=ports)
    with socket.create_server(("127.0.0.1", port)):
        await server.stop()


async def test_engines_of_a_host_share_files_that_stay_when_one_of_them_goes(spec: ServerSpec) -> None:
    # covers: C8
    first, second = (ServerProcess(FILES, spec, index, 0) for index in range(2))
    place, same = [await server.on_host(host_files.find_place, 1000) for server in (first, second)]
    assert place.parent == same.parent
    assert place.name != same.name
    await first.on_host(host_files.store_bucket, 1000, 3, 0, np.arange(10, dtype=np.uint8))
    await first.on_host(host_files.complete, 1000, 3)
    shared = await second.on_host(host_files.link_version, 1000, 3, place.name, [bucket_file(0)])
    await first.stop()
    assert await asyncio.to_thread((Path(str(shared)) / bucket_file(0)).read_bytes) == bytes(range(10))
    assert await second.on_host(host_files.link_version, 1000, 4, place.name, [bucket_file(0)]) is None
    await second.stop()


async def test_a_server_that_ends_early_is_reported_with_its_last_words(spec: ServerSpec) -> None:
    with pytest.raises(EngineStartError, match=r"ended with status 1(.|\n)*no such model"):
        await ServerProcess(running("raise SystemExit('no such model')"), spec, 0, 0).start()


async def test_a_node_that_lacks_files_is_told_before_anything_starts(spec: ServerSpec, tmp_path: Path) -> None:
    files = NodeFiles(present={"--hf-checkpoint": tmp_path / "absent"})
    with pytest.raises(ConfigurationError, match=r"--hf-checkpoint .*/absent: expected this directory"):
        await ServerProcess(FILES, msgspec.structs.replace(spec, files=files), 0, 0).start()


async def test_a_server_that_never_answers_is_ended_at_its_deadline(spec: ServerSpec) -> None:
    program = "import time; print('loading', flush=True); time.sleep(60)"
    server = ServerProcess(running(program), msgspec.structs.replace(spec, start_timeout=1.0), 0, 0)
    with pytest.raises(EngineStartError, match=r"--engine-start-timeout(.|\n)*loading"):
        await server.start()
    assert not await server.alive()


async def test_a_server_leaves_no_files_behind(
    spec: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in its temporary directory, such as SGLang's sockets, are removed with it."""
    program = "import tempfile; [tempfile.NamedTemporaryFile(delete=False) for _ in range(5)]; raise SystemExit('done')"
    monkeypatch.setattr("miles_async.engines.server_process.temporary_parent", lambda: tmp_path / "tmp")
    with pytest.raises(EngineStartError, match="done"):
        await ServerProcess(running(program), spec, 0, 0).start()
    assert list((tmp_path / "tmp").iterdir()) == []


async def test_servers_are_forked_from_a_process_with_the_imports_and_the_variables_of_their_kind(
    spec: ServerSpec, tmp_path: Path
) -> None:
    (Path(spec.model_path) / "made").touch()
    kind = replace(FILES, imports=("http.server",))
    imports = fork_server_of(kind, spec, tmp_path / "socket", {})
    assert imports is not None
    assert "MILES_ASYNC_SEEN_LATER" not in imports.environment
    async with process_running(imports) as processes:
        server = ServerProcess(kind, msgspec.structs.replace(spec, fork_server=imports.path), 0, 0)
        await server.start()
        [forking] = psutil.Process(processes.pid).children()
        assert psutil.Process(await server.pid()).ppid() == forking.pid
        await server.stop()


def test_a_kind_without_imports_and_servers_on_cuda_are_not_forked(spec: ServerSpec, tmp_path: Path) -> None:
    assert fork_server_of(FILES, spec, tmp_path / "socket", {}) is None
    with_imports = replace(FILES, imports=("http.server",))
    on_cuda = msgspec.structs.replace(spec, device="cuda")
    assert fork_server_of(with_imports, on_cuda, tmp_path / "socket", {}) is None


async def test_a_server_sees_the_gpus_that_it_is_given(spec: ServerSpec) -> None:
    (Path(spec.model_path) / "made").touch()
    server = ServerProcess(FILES, msgspec.structs.replace(spec, gpus=("3", "1")), 0, 0)
    await server.start()
    assert psutil.Process(await server.pid()).environ()["CUDA_VISIBLE_DEVICES"] == "3,1"
    await server.stop()


async def test_a_further_node_of_an_engine_has_its_files_at_the_path_of_the_first(spec: ServerSpec) -> None:
    first, other = (ServerProcess(FILES, spec, 0, 0, node) for node in range(2))
    place = await first.host_directory(0)
    assert place is not None
    assert await other.host_directory(0, place) is None  # both on one machine
    elsewhere = place.with_name(f"{place.name}-of-another-machine")
    assert await other.host_directory(0, elsewhere) == elsewhere
    assert await other.on_host(str, 0) == str(elsewhere)
    third = ServerProcess(FILES, spec, 0, 0, 1)
    with pytest.raises(EngineError, match=r"^engine-0\.node1 has no directory for files: .*need the same TMPDIR"):
        await third.host_directory(0, Path("/elsewhere") / place.name)
    for part in (first, other):
        await part.stop()
    assert not place.exists()
    assert not elsewhere.exists()
