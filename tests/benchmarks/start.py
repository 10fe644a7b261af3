"""What it takes to start: engines that import SGLang themselves and engines that are forked, and a whole run.

CPU seconds are of the whole process tree, until the server answers or the first step is trained; they depend less on
what else the machine does than the seconds on the clock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.engines.kind import ServerSpec
from miles_async.engines.server_process import ServerProcess, fork_server_of
from miles_async.engines.sglang.kind import SGLANG
from miles_async.runtime.processes.fork_server_process import running
from miles_async.wiring.early_imports import COMMON
from tests.benchmarks.report import RESULTS, ROOT, Row

MODEL = ROOT / "examples" / "quickstart" / "assets" / "reverse" / "model"
_POLL_SECONDS = 0.2


def rows() -> Iterator[Row]:
    """Engines by themselves, then the quick start up to its first step."""
    prepare_quickstart(["--task", "reverse"])
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        yield from runner.run(_engines(Path(directory)))
    yield _first_step()


async def _engines(directory: Path) -> list[Row]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spec = ServerSpec(model_path=str(MODEL), device="cpu", dtype="float32", log_dir=str(directory), dummy_weights=True)
    found = [await _start("an engine that imports everything itself", ServerProcess(SGLANG, spec, 0, 0))]
    imports = fork_server_of(SGLANG, spec, directory / "socket", {})
    assert imports is not None
    forked = msgspec.structs.replace(spec, fork_server=imports.path)
    async with running(imports, modules=COMMON) as importing:
        first = ServerProcess(SGLANG, forked, 1, 0)
        found.append(await _start("the first that is forked, with the imports", first, importing=importing.pid))
        found.append(await _start("the second", ServerProcess(SGLANG, forked, 2, 0)))
        started = time.perf_counter()
        os.kill(await first.pid(), signal.SIGKILL)
        await first.wait_exit()
        await first.stop()
        found.append(
            await _start("the first again, since it was killed", ServerProcess(SGLANG, forked, 1, 1), started=started)
        )
    return found


async def _start(
    what: str, server: ServerProcess, *, importing: int | None = None, started: float | None = None
) -> Row:
    """``importing``: pid of the process that imports for it first; the server then goes on running."""
    started = time.perf_counter() if started is None else started
    await server.start()
    seconds = time.perf_counter() - started
    cpu = _cpu_seconds(await server.pid() if importing is None else importing)
    if importing is None:
        await server.stop()
    return {"start": what, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}


def _first_step() -> Row:
    """The quick start until its first step is trained."""
    command = [sys.executable, "-m", "miles_async", "train", "@examples/quickstart/reverse.args", "--no-use-wandb"]
    command += ["--run-dir", str(RESULTS / "start"), "--save-hf", "none"]
    started, seconds, seen = time.perf_counter(), None, dict[int, float]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while seconds is None and run.poll() is None:
            time.sleep(_POLL_SECONDS)
            for each in (process, *process.children(recursive=True)):
                seen[each.pid] = _own_cpu_seconds(each)
            if '"reward/mean"' in _text(RESULTS / "start" / "metrics.jsonl"):
                seconds = time.perf_counter() - started
                run.send_signal(signal.SIGINT)
    if seconds is None:
        raise SystemExit(f"{' '.join(command)} ended with status {run.returncode} before its first step")
    return {
        "start": "the quick start, up to its first step",
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(seen.values()), 1),
    }


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(map(_own_cpu_seconds, (process, *process.children(recursive=True))))


def _own_cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
