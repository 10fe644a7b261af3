"""The process of an inference server of any kind, and its supervision.

:class:`ServerProcess` becomes a Ray actor where Ray places engines (see ``placement.py``). It is plain asyncio, so
tests and tools use it without Ray.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from miles_async.engines.http import Http
from miles_async.engines.kind import Arguments, EngineKind, Result, ServerSpec
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.files.owned_directory import OwnedDirectory, temporary_parent
from miles_async.runtime.files.scratch import same_directory, scratch_directory
from miles_async.runtime.network.addresses import ANY, LOOPBACK
from miles_async.runtime.network.keys import require_keys
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.fork_server_process import READ_LATE, ForkServer
from miles_async.runtime.tasks import afterwards, quietly

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 5.0


class ServerProcess:
    """One start of one server, or of its part on one node, as a child of this process. A restart is a new instance.

    It is a ``ServerHandle``. Only the part on the first node serves; the others are started by :meth:`follow`.
    """

    def __init__(self, kind: EngineKind, spec: ServerSpec, engine_index: int, incarnation: int, node: int = 0) -> None:
        """``incarnation``: number of this start of the engine; each has its own log file."""
        self._kind = kind
        self._spec = spec
        self._seed = spec.random_seed + engine_index
        self._node = node
        self._name = f"{spec.group}-{engine_index}" + (f".node{node}" if node else "")
        self._ports: list[HeldPort] = []
        self._log_path = Path(spec.log_dir) / f"{self._name}.{incarnation}.log"
        self._process: ChildProcess | None = None
        self._temporary: OwnedDirectory | None = None  # the server's TMPDIR
        self._directory: OwnedDirectory | None = None  # for on_host()
        self._choosing_directory = asyncio.Lock()

    async def open_rendezvous(self) -> tuple[str, int]:
        """Choose an address and a port of this node, where the server's ranks on all its nodes meet."""
        above = self._kind.above_rendezvous(self._spec)
        if self._spec.nodes > 1:
            address = self._spec.network.address()
            return address, self._hold_port(address, above)
        return LOOPBACK, self._hold_port(ANY, above)  # else the node's address may have a server at the same port

    async def start(self, rendezvous: tuple[str, int] | None = None) -> str:
        """Start the server, wait until it answers and return its URL.

        ``rendezvous``: of :meth:`open_rendezvous`; None if this is the only node. Raises EngineStartError with its last
        log lines when the process ends or the deadline passes, ConfigurationError if this node lacks files, or its
        address in the certificate.
        """
        url = await self._prepare(rendezvous)
        try:
            async with asyncio.timeout(self._spec.start_timeout):
                await self._until_up(url)
        except TimeoutError:
            message = self._report(f"did not come up within {self._spec.start_timeout:g} s (--engine-start-timeout)")
            await self.stop()
            raise EngineStartError(message) from None
        except BaseException:
            await quietly(self.stop())
            raise
        self._release_ports()
        return url

    async def follow(self, rendezvous: tuple[str, int]) -> None:
        """Start the part of a server on this node, which joins the first node's at ``rendezvous``; it is up when that
        one is.
        """
        await self._prepare(rendezvous)
        await self._begin()

    async def _prepare(self, rendezvous: tuple[str, int] | None) -> str:
        """Make the process, not started; return the URL at which it will listen."""
        self._spec.files.check()
        network, keys = self._spec.network, self._spec.keys
        host = network.address()
        require_keys(host, keys)
        if network.tls is not None:
            network.tls.check(host)
        rendezvous = rendezvous or await self.open_rendezvous()
        port = self._hold_port(host)
        command = self._kind.command(self._spec, host, port, rendezvous, self._seed, self._node)
        self._temporary = await asyncio.to_thread(OwnedDirectory, temporary_parent(), mode=0o700)
        environment = {**self._kind.environment(self._spec), **network.variables()}
        if self._spec.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._spec.gpus)
        environment["TMPDIR"] = str(self._temporary.path)
        environment |= {name: secret.reveal() for name, secret in self._spec.secrets.items()}
        environment |= keys.environment() if keys is not None else {}
        self._process = ChildProcess(self._name, command, log_path=self._log_path, environment=environment)
        return network.url(host, port)

    def _hold_port(self, address: str, above: Sequence[int] = ()) -> int:
        """Hold a port, and those ``above`` it, until the server listens, seconds later: Linux lets it, since it binds
        with SO_REUSEADDR like us.
        """
        self._ports.append(HeldPort(address, ports=self._spec.network.ports, above=above))
        return self._ports[-1].number

    def _release_ports(self) -> None:
        while self._ports:
            self._ports.pop().release()

    async def wait_exit(self) -> str:
        """Wait until the process ends. Returns why, with its last log lines."""
        assert self._process is not None
        status = await self._process.wait()
        return self._report(f"ended with status {status}")

    async def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        """Call ``function(directory, *arguments)`` in a thread; see ``seams.EngineFleet``."""
        directory = await self.host_directory(room)
        assert directory is not None
        try:
            return await asyncio.to_thread(function, directory, *arguments)
        except Exception as error:  # supervision point: it costs this engine, not the run
            raise EngineError(f"{function.__name__} on its host: {type(error).__name__}: {error}") from error

    async def host_directory(self, room: int, place: Path | None = None) -> Path | None:
        """Directory of :meth:`on_host`, made at the first call. ``place``: that of the engine's first node, whose path
        it has to have; None if they are on one machine. Raises EngineError.
        """
        async with self._choosing_directory:
            try:
                if self._directory is None and place is not None:
                    self._directory = await asyncio.to_thread(same_directory, place, room)
                elif self._directory is None:
                    self._directory = await asyncio.to_thread(scratch_directory, room)
            except OSError as error:
                raise EngineError(f"{self._name} has no directory for files: {error}") from error
        return None if self._directory is None else self._directory.path

    async def stop(self) -> None:
        """End it and all its children at once: it has no state to save, and SGLang takes 6 s to react to a SIGTERM."""
        if self._process is not None:
            await self._process.stop(grace_seconds=0)
        self._release_ports()
        for directory in (self._temporary, self._directory):
            if directory is not None:
                directory.remove()

    async def _until_up(self, url: str) -> None:
        assert self._process is not None
        assert self._temporary is not None
        started = time.monotonic()
        await self._begin()
        http = Http(self._spec.keys, self._spec.network.tls)
        async with afterwards(http.close):
            while self._process.returncode is None:
                is_up = False
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_SECONDS):
                        is_up = await self._kind.is_up(http, url)
                self._temporary.owns(self._process.note_shared_memory())  # removed even if this process is killed, too
                if is_up:
                    return
                await asyncio.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - started
        raise EngineStartError(self._report(f"ended with status {self._process.returncode} after {seconds:.0f} s"))

    async def _begin(self) -> None:
        assert self._process is not None
        if self._spec.fork_server is not None:
            await self._process.fork(self._spec.fork_server)
        else:
            self._process.start()

    def _report(self, what: str) -> str:
        assert self._process is not None
        return (
            f"{self._name} ({self._kind.name}, model {self._spec.model_path}) {what}. "
            f"Last lines of {self._log_path}:\n{self._process.tail()}"
        )


def fork_server_of(
    kind: EngineKind, spec: ServerSpec, socket: Path, environment: Mapping[str, str]
) -> ForkServer | None:
    """Describe the process that has imported what servers need and forks them, listening on ``socket``. None for a kind
    that is not forked, and on CUDA, which imports may initialize and no fork survives.

    ``environment``: variables that the servers' parents have beyond ours.
    """
    if spec.device != "cpu" or not kind.imports:
        return None
    added = {name: value for name, value in kind.environment(spec).items() if not re.fullmatch(READ_LATE, name)}
    return ForkServer(
        path=socket,
        modules=kind.imports,
        environment={**environment, **added},
        log_path=Path(spec.log_dir) / "engine_imports.log",
        own=kind.own_variables,
    )
