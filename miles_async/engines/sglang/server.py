"""An SGLang server process and its supervision.

:class:`EngineServer` becomes a Ray actor where Ray places engines (see ``placement.py``); it is plain asyncio, so tests
and tools use it without Ray. One instance supervises one process; a restart is a new instance.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from miles_async.engines.kind import Arguments, Result, ServerSpec
from miles_async.engines.sglang.cpu_memory import memory_flags
from miles_async.engines.sglang.names import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.addresses import LOOPBACK, HeldPort, node_host
from miles_async.runtime.child_process import ChildProcess
from miles_async.runtime.owned_directory import OwnedDirectory, temporary_parent
from miles_async.runtime.scratch import scratch_directory
from miles_async.runtime.tasks import quietly

_POLL_SECONDS = 0.2
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
_KEEP_ALIVE_SECONDS = "86400"  # closing a connection of the router's just as a request comes fails the request

# Flags without which SGLang does not run on a CPU.
_CPU_FLAGS = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
)


class EngineServer:
    """One start of one SGLang server: a ``ServerHandle``."""

    def __init__(self, spec: ServerSpec, engine_index: int, incarnation: int) -> None:
        """``incarnation``: number of this start of the engine; each has its own log file."""
        self._spec = spec
        self._seed = spec.random_seed + engine_index
        self._name = f"{spec.group}-{engine_index}"
        self._log_path = Path(spec.log_dir) / f"{self._name}.{incarnation}.log"
        self._process: ChildProcess | None = None
        self._temporary: OwnedDirectory | None = None  # the server's TMPDIR
        self._directory: OwnedDirectory | None = None  # for on_host()
        self._choosing_directory = asyncio.Lock()

    async def start(self) -> str:
        """Start the server, wait until it answers and return its URL.

        Raises EngineStartError with its last log lines when the process ends or the deadline passes.
        """
        host = node_host(single_node=self._spec.single_node)
        # The ports stay held until the server listens, seconds later: Linux lets it, since it binds with
        # SO_REUSEADDR like us.
        with HeldPort(host) as port, HeldPort(host) as rendezvous:
            command = server_command(self._spec, host, port.number, rendezvous.number, self._seed)
            self._temporary = await asyncio.to_thread(OwnedDirectory, temporary_parent(), mode=0o700)
            environment = server_environment(self._spec) | {"TMPDIR": str(self._temporary.path)}
            self._process = ChildProcess(self._name, command, log_path=self._log_path, environment=environment)
            url = f"http://{host}:{port.number}"
            await self._until_up_or_stopped(url)
        return url

    async def wait_exit(self) -> str:
        """Wait until the process ends. Returns why, with its last log lines."""
        assert self._process is not None
        status = await self._process.wait()
        return self._report(f"ended with status {status}")

    async def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.returncode is None

    async def pid(self) -> int:
        """PID of the server's main process."""
        assert self._process is not None
        return self._process.pid

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        """Call ``function(directory, *arguments)`` in a thread; see ``seams.EngineFleet``."""
        try:
            async with self._choosing_directory:
                if self._directory is None:
                    self._directory = await asyncio.to_thread(scratch_directory, room)
            return await asyncio.to_thread(function, self._directory.path, *arguments)
        except Exception as error:  # supervision point: it costs this engine, not the run
            raise EngineError(f"{function.__name__} on its host: {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        """End it and all its children at once: it has no state to save, and would take 6 s to react to a SIGTERM."""
        if self._process is not None:
            await self._process.stop(grace_seconds=0)
        for directory in (self._temporary, self._directory):
            if directory is not None:
                directory.remove()

    async def _until_up_or_stopped(self, url: str) -> None:
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

    async def _until_up(self, url: str) -> None:
        assert self._process is not None
        assert self._temporary is not None
        started = time.monotonic()
        if self._spec.fork_server is not None:
            await self._process.fork(self._spec.fork_server)
        else:
            self._process.start()
        async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session:
            while self._process.returncode is None:
                is_up = await _answers(session, url)
                self._temporary.owns(self._process.note_shared_memory())  # removed even if this process is killed, too
                if is_up:
                    await _freeze_garbage_collector(session, url)
                    return
                await asyncio.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - started
        raise EngineStartError(self._report(f"ended with status {self._process.returncode} after {seconds:.0f} s"))

    def _report(self, what: str) -> str:
        assert self._process is not None
        return (
            f"{self._name} (SGLang, model {self._spec.model_path}) {what}. "
            f"Last lines of {self._log_path}:\n{self._process.tail()}"
        )


def server_command(spec: ServerSpec, host: str, port: int, rendezvous_port: int, seed: int) -> list[str]:
    """Interpreter arguments that start the server. Later ones win, and the user's come last."""
    command = [
        "-m",
        "miles_async.engines.sglang.launcher",
        f"--model-path={spec.model_path}",
        # Other machines reach it by the name that we give them; on one node nobody else should.
        f"--host={LOOPBACK if host == LOOPBACK else '0.0.0.0'}",
        f"--port={port}",
        f"--nccl-port={rendezvous_port}",
        f"--device={spec.device}",
        f"--dtype={spec.dtype}",
        f"--tp-size={spec.tensor_parallel_size}",
        f"--random-seed={seed}",
        f"--grammar-backend={'xgrammar' if spec.grammars else 'none'}",
        "--skip-server-warmup",  # the canary of the first publication is its warm-up
        "--sleep-on-idle",  # else each scheduler spins on a core
        "--log-level=warning",
    ]
    if spec.dummy_weights:
        # A draft model for speculative decoding gets no publications: it keeps what its checkpoint has.
        command += ["--load-format=dummy", "--speculative-draft-load-format=auto"]
    if spec.device == "cpu":
        command += _CPU_FLAGS
        command += memory_flags(
            spec.model_path,
            spec.dtype,
            longest=spec.longest_sample,
            running=spec.concurrency,
            engines=spec.engines_on_host,
        )
    return [*command, *spec.extra]


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """Variables to add to the environment of the server."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_TIMEOUT_KEEP_ALIVE": _KEEP_ALIVE_SECONDS,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # log-probs at the sampling temperature, as the trainer's are
    }
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        # Ranks of one engine look at the same memory one after the other, while neighbours take theirs.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    elif "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # compiled kernels outlive a server, unlike its other files
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    if spec.held_weights:
        environment[HELD_WEIGHTS_VARIABLE] = "1"
    if spec.weight_group_seconds is not None:
        environment[WEIGHT_GROUP_SECONDS_VARIABLE] = str(spec.weight_group_seconds)
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/model_info") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _freeze_garbage_collector(session: aiohttp.ClientSession, url: str) -> None:
    """Exempt everything loaded so far from garbage collection, as SGLang does after the warm-up that we skip.

    Every flush of its cache collects garbage, which with all of torch in the heap is most of a publication's pause.
    """
    with suppress(aiohttp.ClientError, TimeoutError):  # only speed is lost
        async with session.post(f"{url}/freeze_gc"):
            pass
