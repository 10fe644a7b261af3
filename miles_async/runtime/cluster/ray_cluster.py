"""Ray: starting or joining a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray._private.node import Node

from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster import agent_setup, worker_setup
from miles_async.runtime.cluster.ray_address import TOKEN_MODE, find_entry
from miles_async.runtime.files.private import make_private
from miles_async.runtime.processes.run_process import is_alive
from miles_async.runtime.texts import last_lines, shortened

OBJECT_STORE_BYTES = 1 << 30  # of a cluster that we start: train batches pass through it, weights don't
SHUTDOWN_SECONDS = 30.0
_HANDLER_SECONDS = 0.02
_AGENT_SECONDS = 300  # for an agent of Ray to come up; Ray's own default, 30 s, is short on a busy machine
_DIRECTORY_VARIABLE = "RAY_TMPDIR"  # where Ray keeps its files


@asynccontextmanager
async def ray_cluster(address: str | None, environment: Mapping[str, str], own: OwnRay | None) -> AsyncIterator[None]:
    """Connect to Ray for the duration of a run: to the cluster at ``address``, or to a new one on this machine.

    ``own`` is notified when it is shut down. Raises ConfigurationError if there is no cluster at ``address``, or no
    room for one on this machine.
    """
    # While connecting, Ray's C++ core installs its own handler, which dumps stacks and aborts. `getsignal` returns
    # Python's handler even if it was replaced in C.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    thread = _RayThread(lambda: _connect(address, environment))
    thread.start()
    try:
        while not thread.connected.done():
            await asyncio.wait([thread.connected], timeout=_HANDLER_SECONDS)
            signal.signal(signal.SIGTERM, on_sigterm)
        thread.connected.result()
        try:
            yield
        finally:
            if own is not None:
                own.ends()
    finally:
        thread.close()
        with suppress(TimeoutError):  # its processes die with this one
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                await thread.closed


class _RayThread(threading.Thread):
    """Connects and disconnects in a thread, so that the event loop stays free for signals.

    One thread for both: a cluster of our own ends with the thread that started it (PR_SET_PDEATHSIG). In this thread
    Ray does not replace the handler of SIGTERM either.
    """

    def __init__(self, connect: Callable[[], None]) -> None:
        super().__init__(name="ray", daemon=True)
        self._connect = connect
        self._over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.connected: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        try:
            self._connect()
        except BaseException as error:  # supervision point: it is raised where the connection is awaited
            self._settle(self.connected, error)
        else:
            self._settle(self.connected)
            self._over.wait()
        ray.shutdown()
        self._settle(self.closed)

    def close(self) -> None:
        """Disconnect, waiting for a connection in progress."""
        self._over.set()

    def _settle(self, future: asyncio.Future[None], error: BaseException | None = None) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            future.set_exception(error) if error else future.set_result(None)

        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(settle)


def _connect(address: str | None, environment: Mapping[str, str]) -> None:
    options: dict[str, object] = (
        {"address": address}
        if address
        # "local", or Ray would join whatever `ray start` left on this machine. Actors ask for GPUs only: on a laptop
        # more processes than cores is the normal case.
        else {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(ray_directory()),
        }
    )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # workers without our runtime environments: unused
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")  # a Ray job has its own variables
    os.environ.setdefault("RAY_worker_niceness", "0")  # not 15: engines, which are no workers, would come first
    if not address:
        os.environ.setdefault("RAY_agent_register_timeout_ms", str(_AGENT_SECONDS * 1000))
        worker_setup.install()
        agent_setup.install()
        _start_no_services()
    where = f"--ray-address {address}" if address else "Ray cannot start on this machine"
    if address and address != "auto" and find_entry(address) == "token":
        os.environ[TOKEN_MODE] = "token"  # by itself Ray shows its token to no address that it was given
        ray._raylet.Config.initialize("")  # Ray has read its environment when it was imported
    try:
        ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": dict(environment)}, **options)
    except Exception as error:  # supervision point: no cluster, another version, no memory; Ray raises what it likes
        raise ConfigurationError(f"{where}: {' '.join(str(error).split())}") from error
    protect_token()


def ray_directory() -> Path:
    """Make a place for Ray's sessions: ``ray-UID/r`` in $RAY_TMPDIR or /tmp, where ``ray-UID`` has mode 0700.

    Ray makes its session directories, with the sockets of its object store, writable for everybody, so the directory
    above is the closed one. It is short, since paths of sockets may have 107 characters. Raises ConfigurationError if
    another user has made ``ray-UID``.
    """
    path = Path(os.environ.get(_DIRECTORY_VARIABLE) or "/tmp") / f"ray-{os.getuid()}"
    try:
        make_private(path)
    except PermissionError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}: remove it, or name another place by {_DIRECTORY_VARIABLE}"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot hold Ray's files ({error.strerror}): name another place by {_DIRECTORY_VARIABLE}"
        ) from error
    return path / "r"


def protect_token() -> None:
    """Make the token that Ray has written to ~/.ray readable for this user alone."""
    with suppress(OSError, RuntimeError):  # there is none, or it is managed by others
        token = Path.home() / ".ray" / "auth_token"
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def _start_no_services() -> None:
    """Have Ray (2.60) start no API server, autoscaler and log monitor from now on: no run of one machine calls them,
    ``ray.init`` waits for the first, and each takes half a second of CPU.
    """
    for service in ("api_server", "monitor", "log_monitor"):
        setattr(Node, f"start_{service}", _start_nothing)


def _start_nothing(node: Node, **options: object) -> None:
    pass


OUTPUT_BYTES = 4096  # read of the end of an output
LINE_LENGTH = 500  # characters

NEEDED = ("gcs_server", "raylet")  # no call into Ray is answered without both


class OwnRay:
    """Watches the processes that ``ray.init`` starts as children of this one."""

    def __init__(self) -> None:
        self._seen: dict[str, psutil.Process] = {}
        self._outputs: dict[str, list[Path]] = {}  # files of standard error and output
        self._lost = ""
        self._ending = False

    def lost(self) -> str:
        """Name the processes that ended without a shutdown of Ray, with the last line of each; empty if none did."""
        if self._lost or self._ending:
            return self._lost
        if len(self._seen) < len(NEEDED):  # while Ray starts; later, listing all processes would cost too much
            named = {_name(child): child for child in psutil.Process().children()}
            found = {name: child for name, child in named.items() if name in NEEDED and name not in self._seen}
            self._seen |= found
            self._outputs |= {name: _outputs(child.pid) for name, child in found.items()}
        dead = [
            f"{name} (process {process.pid}{_last_line(self._outputs[name])})"
            for name, process in self._seen.items()
            if not is_alive(process)
        ]
        if dead:
            self._lost = f"Ray has ended: {' and '.join(dead)}"
        return self._lost

    def ends(self) -> None:
        """Expect Ray to end from now on."""
        self._ending = not self.lost()


def _outputs(pid: int) -> list[Path]:
    with suppress(OSError):  # it has just ended
        return [Path(f"/proc/{pid}/fd/{number}").readlink() for number in (2, 1)]
    return []


def _last_line(files: Sequence[Path]) -> str:
    """The last line of the first file that has one, to append to a message."""
    for path in files:
        if path.is_file() and (lines := last_lines(path, OUTPUT_BYTES)):
            return f", whose last line is: {shortened(lines[-1], LINE_LENGTH)}"
    return ""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
