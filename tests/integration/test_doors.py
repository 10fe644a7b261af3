"""The doors of a real run, tried from outside: what needs a key, where they listen, where secrets can be seen; and that
they speak TLS alone where the user gives certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import aiohttp
import psutil
import pytest

from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.runtime.network.addresses import LOOPBACK, Network
from miles_async.runtime.network.keys import KEY_VARIABLES, METRICS_KEY_VARIABLE, Secret
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.network.tls import Tls
from tests.fakes.certificates import Authority, needs_openssl
from tests.fakes.keys import KEYS, OTHER_KEYS
from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Answer = TypeVar("Answer")

SECRETS = {
    "HF_TOKEN": "hf_0123456789abcdefghijklmnop",
    "WANDB_API_KEY": "0123456789" * 4,
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "SEARCH_TOKEN": "a-token-of-some-service",
}


# ------------------------------------------------------------------------------------------------------ the router
def client(tls: Tls | None) -> aiohttp.ClientSession:
    """A client that trusts the authority of ``tls``."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client() if tls else True))


async def answer(method: str, path: str, key: Secret | None, url: str, tls: Tls | None = None) -> int:
    """The status of a request to ``url``."""
    headers = key.headers() if key else {}
    async with client(tls) as http, http.request(method, url + path, json={}, headers=headers) as response:
        return response.status


async def test_the_router_opens_with_the_runs_keys_only(tmp_path: Path) -> None:  # covers: C13
    http = Http(KEYS.engines)
    router = Router(EngineRegistry(), http, log_dir=tmp_path, keys=KEYS.engines, extra=("--log-level=debug",))
    try:
        await router.start()
        keys = KEYS.engines
        for stranger in (None, Secret("wrong"), OTHER_KEYS.engines.api, OTHER_KEYS.engines.admin):
            for method, path in (("POST", "/generate"), ("POST", "/v1/chat/completions"), ("GET", "/workers")):
                assert await answer(method, path, stranger, router.url) == 401
        assert await answer("POST", "/workers", keys.api, router.url) in (401, 403)  # it is for the admin
        assert await answer("POST", "/flush_cache", keys.api, router.url) in (401, 403)
        assert await answer("GET", "/workers", keys.admin, router.url) == 200
        arguments = " ".join(psutil.Process(await router.pid()).cmdline())
        seen = arguments + "".join(path.read_text() for path in tmp_path.glob("*.log"))  # noqa: ASYNC240
        assert not [key for key in (keys.api, keys.admin) if key.reveal() in seen]
    finally:
        await router.stop()
        await http.close()


async def test_a_router_is_reached_from_elsewhere_if_it_has_a_port_of_its_own(tmp_path: Path) -> None:
    # covers: C13
    http = Http(KEYS.engines)
    with HeldPort(LOOPBACK) as port:
        own = port.number
    found = {}
    for chosen in (None, own):
        network = Network(host="127.0.0.5")  # every address in 127.0.0.0/8 is this machine's
        router = Router(EngineRegistry(), http, log_dir=tmp_path, keys=KEYS.engines, network=network, port=chosen)
        try:
            await router.start()
            connections = psutil.Process(await router.pid()).net_connections()
            found[chosen] = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        finally:
            await router.stop()
    await http.close()
    assert found == {None: {LOOPBACK}, own: {"127.0.0.5", LOOPBACK}}  # the second: of its metrics


# --------------------------------------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority.make(tmp_path_factory.mktemp("authority")).issue(LOOPBACK)


@pytest.fixture(scope="module")
def run(tls: Tls) -> Iterator[RealRun]:
    """A run with agents and TLS that has trained."""
    agent = f"python {Path(__file__).with_name('one_turn_agent.py')}"
    flags = (
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-rollout", "2000"),
        # Few at a time: each sample is a process of its own.
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--eval-prompt-data", "none", "--eval-interval", "none", "--session-server-workers", "2"),
        *("--tls-certificate", tls.certificate, "--tls-key", tls.key, "--tls-ca", str(tls.ca)),
    )
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)  # Ray's sockets are in it, and have short paths
        for variable, text in SECRETS.items():
            patch.setenv(variable, text)
        patch.setenv("RAY_TMPDIR", str(directory))
        forwarded = ("--forward-env", "SEARCH_TOKEN", "HF_*", "AWS_*", "WANDB_*", "PYTHONPATH")
        with real_run(directory / "run", *flags, *forwarded, "--agent-command", agent) as started:
            started.wait_for_steps(2, 200)
            yield started


def of_processes(run: RealRun, ask: Callable[[psutil.Process], Answer]) -> dict[str, Answer]:
    """The answers of all processes of the run, by their command lines. Agents come and go meanwhile."""
    found = {}
    for process in run.processes():
        with suppress(psutil.NoSuchProcess):
            found[f"{process.pid} {' '.join(process.cmdline())}"] = ask(process)
    return found


def doors(run: RealRun) -> dict[str, list[tuple[str, int]]]:
    """Where servers of the run listen: name of the server → address and port."""
    known = {
        "sglang.launcher": "engine",
        "sglang::scheduler": "ranks of an engine",
        "router_launcher": "router",
        "smg::": "router",
        "session_process": "sessions",
    }
    found: dict[str, list[tuple[str, int]]] = {}
    for line, connections in of_processes(run, lambda process: process.net_connections("tcp")).items():
        name = next((name for part, name in known.items() if part in line), "other")
        listening = [tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN]
        found[name] = found.get(name, []) + listening
    return found


def secrets_of(run: RealRun) -> dict[str, str]:
    """The keys that processes of the run were given, and the user's own secrets."""
    found = dict(SECRETS)
    for environment in of_processes(run, lambda process: process.environ()).values():
        found |= {name: text for name, text in environment.items() if name in KEY_VARIABLES}
    assert set(found) == {*KEY_VARIABLES, *SECRETS} - {METRICS_KEY_VARIABLE}  # only with --use-prometheus
    return found


def http_ports(run: RealRun, name: str) -> list[int]:
    return [port for _, port in doors(run)[name]]


ENGINE_DOORS = (
    *(("POST", path) for path in ("/generate", "/v1/chat/completions", "/update_weights_from_tensor", "/flush_cache")),
    *(("POST", path) for path in ("/update_weights_from_disk", "/pause_generation", "/init_weights_update_group")),
    *(("GET", path) for path in ("/model_info", "/server_info", "/get_weights_by_name", "/v1/realtime", "/docs")),
    *(("GET", path) for path in ("/health_generate", "/metrics")),
)


@needs_openssl
async def test_an_engine_opens_with_the_runs_keys_only(run: RealRun, tls: Tls) -> None:  # covers: C13
    found = secrets_of(run)
    api = Secret(found["MILES_ASYNC_API_KEY"])
    (port,) = http_ports(run, "engine")
    url = f"https://{LOOPBACK}:{port}"
    for stranger in (None, Secret("wrong"), KEYS.engines.api, KEYS.engines.admin):
        assert [await answer(*door, stranger, url, tls) for door in ENGINE_DOORS] == [401] * len(ENGINE_DOORS)
    assert await answer("GET", "/model_info", api, url, tls) == 200
    for path in ("/update_weights_from_tensor", "/pause_generation", "/flush_cache", "/abort_request"):
        assert await answer("POST", path, api, url, tls) == 401  # generating is not administering
    assert await answer("GET", "/health", None, url, tls) == 200
    assert await answer("GET", "/ready", None, url, tls) in (200, 503)  # the latter while it is paused
    assert await answer("GET", "/health_generate", api, url, tls) == 200  # as the run asks whether it makes progress
    async with client(tls) as http, http.get(f"{url}/server_info", headers=api.headers()) as response:
        told = await response.text()
    assert not [name for name, text in found.items() if text in told]
    admin = Secret(found["MILES_ASYNC_ADMIN_KEY"])
    # The run does this once the server is up; SGLang, which has no key, leaves it.
    assert await answer("POST", "/freeze_gc", admin, url, tls) == 200
    (log,) = (run.run_dir / "logs").glob("engine-*.log")
    assert "freeze_gc failed" not in log.read_text()
    async with client(tls) as http:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"{url}/v1/realtime", headers=api.headers())


async def metrics_port(run: RealRun) -> int:
    """The port of the router's metrics, which have neither TLS nor a key (docs/security.md)."""
    found = []
    for port in http_ports(run, "router"):
        with suppress(aiohttp.ClientError):
            if await answer("GET", "/metrics", None, f"http://{LOOPBACK}:{port}") == 200:
                found.append(port)
    (port,) = found
    return port


@needs_openssl
async def test_router_and_sessions_of_a_run_are_locked(run: RealRun, tls: Tls) -> None:  # covers: C13
    metrics = await metrics_port(run)
    for name, paths in {"router": ("/generate", "/workers"), "sessions": ("/sessions", "/health")}.items():
        ports = http_ports(run, name)
        assert ports
        for port in ports:
            url = f"{'http' if port == metrics else 'https'}://{LOOPBACK}:{port}"
            for path in paths:
                for key in (None, KEYS.sessions.run):
                    assert await answer("POST", path, key, url, tls) in (401, 404, 405)


@needs_openssl
async def test_doors_speak_tls_alone_and_show_a_certificate_of_the_authority(run: RealRun) -> None:  # covers: C13
    found, metrics = doors(run), await metrics_port(run)
    for port in {port for name in ("engine", "router", "sessions") for _, port in found[name]} - {metrics}:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):  # a client that does not trust the authority
            await answer("GET", "/health", None, f"https://{LOOPBACK}:{port}")
        with pytest.raises(aiohttp.ClientError):
            await answer("GET", "/health", None, f"http://{LOOPBACK}:{port}")


@needs_openssl
def test_a_run_on_one_machine_is_not_reached_from_others(run: RealRun) -> None:  # covers: C13
    listening = doors(run)
    for name in ("engine", "ranks of an engine", "router", "sessions"):
        assert {host for host, _ in listening[name]} == {LOOPBACK}


@needs_openssl
def test_secrets_are_in_no_argument_log_or_dump(run: RealRun) -> None:  # covers: C13
    secrets = secrets_of(run)
    shown = {"arguments": "\n".join(of_processes(run, lambda process: None)), "output": run.output}
    files = [path for path in run.run_dir.parent.rglob("*") if path.is_file()]  # Ray's logs are there, too
    assert any(path.name == "config.toml" for path in files)
    assert any("runtime_env" in path.name for path in files)
    for path in files:
        with suppress(FileNotFoundError):  # the run goes on, and renames and removes some
            shown[str(path)] = path.read_bytes().decode(errors="replace")
    assert not [(name, where) for where, text in shown.items() for name, secret in secrets.items() if secret in text]
