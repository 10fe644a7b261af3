"""Programs of the model are judged by their tests, and can do no harm."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_async.errors import ConfigurationError, RewardError
from miles_async.rewards import code_tests, sandbox
from miles_async.rewards.code_tests import CodeReward, require_sandbox
from miles_async.rewards.programs import run_program
from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt
from tests.property.builders import make_sample

SUMS = {"inputs": ["1 2\n", "10 -3"], "outputs": ["3", "7\n"]}
MIB = 1 << 20


def run(source: str, text: str = "", *, seconds: float = 30.0, memory: int = 1024 * MIB) -> str | None:
    return run_program(source, text, seconds, memory)


def prompt(tests: Any = None, label: str | None = None) -> Prompt:
    return Prompt(
        prompt_id="p:1", token_ids=(1,), text="", label=label, metadata={} if tests is None else {"tests": tests}
    )


# ------------------------------------------------------------------------------------------------------------ judging
@pytest.fixture
async def reward() -> AsyncIterator[CodeReward]:
    workers = WorkerPool(2, timeout=60.0)
    yield CodeReward(workers, seconds=30.0, memory_mib=1024)
    await workers.close()


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("a, b = input().split()\nprint(int(a) + int(b), end='  \\n\\n')", 1.0),  # white space is not judged
        ("print(3)", 0.0),  # right for one of the tests
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("print(sum(map(int, input().split()))", 0.0),  # no Python
        ("", 0.0),
    ],
)
async def test_a_program_is_right_if_it_prints_what_every_test_expects(reward: CodeReward, program: str, right: float):
    thoughts = "<think>```python\nno\n```</think>"
    response = f"{thoughts}First try:\n```python\nprint(0)\n```\nBetter:\n```python\n{program}\n```\nDone."
    assert await reward(prompt(SUMS), make_sample([0], text=response)) == right


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def double(n):\n    return 2 * n", 1.0),
        ("print('debugging', end='')\ndouble = lambda n: n + n", 1.0),
        ("def double(n):\n    return n", 0.0),
        ("raise SystemExit(0)", 0.0),  # leaving before the tests
        ("import os\nos._exit(0)", 0.0),
    ],
)
async def test_a_program_is_right_if_no_statement_after_it_fails(reward: CodeReward, program: str, right: float):
    tests = ["assert double(2) == 4", "assert double(0) == 0"]
    assert await reward(prompt(tests), make_sample([0], text=f"```py\n{program}\n```")) == right
    assert await reward(prompt(label=json.dumps(tests)), make_sample([0], text=f"```\n{program}\n```")) == right


async def test_a_response_without_a_program_is_wrong(reward: CodeReward):
    assert await reward(prompt(SUMS), make_sample([0], text="I don't know; print(3)?")) == 0.0
    thought = "<think>```python\nprint(sum(map(int, input().split())))\n```</think> I don't know."
    assert await reward(prompt(SUMS), make_sample([0], text=thought)) == 0.0


@pytest.mark.parametrize(
    ("tests", "label", "message"),
    [
        (None, None, "p:1: expected tests"),
        (None, "no JSON", "p:1: expected tests"),
        ({"inputs": ["1"], "outputs": []}, None, "p:1: 1 inputs, but 0 outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, None, "fn_name"),
        ([], None, "p:1: its list of tests is empty"),
    ],
)
async def test_a_row_without_tests_is_an_error(reward: CodeReward, tests: Any, label: str | None, message: str):
    with pytest.raises(RewardError, match=message):
        await reward(prompt(tests, label), make_sample([0], text="```\n```"))


async def test_tests_that_take_too_long_together_are_an_error_and_leave_no_process():
    workers = WorkerPool(1, timeout=2.0)
    reward = CodeReward(workers, seconds=30.0, memory_mib=1024)
    running: list[psutil.Process] = []
    try:
        call = asyncio.create_task(reward(prompt(SUMS), make_sample([0], text="```\nimport time\ntime.sleep(29)\n```")))
        while not running and not call.done():
            running = confined()
            await asyncio.sleep(0.02)
        with pytest.raises(RewardError, match="--reward-timeout 2 s"):
            await call
    finally:
        await workers.close()
    assert running
    assert not psutil.wait_procs(running, timeout=10)[1]


def confined() -> list[psutil.Process]:
    """Programs that descendants of ours run."""
    ours = psutil.Process().children(recursive=True)
    return [process for process in ours if sandbox.__file__ in process.cmdline()]


def test_machines_whose_calls_are_not_known_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch):
    require_sandbox()
    monkeypatch.setattr(code_tests.sandbox, "ARCHITECTURES", {"x86_64": (0, 0), "aarch64": (0, 0)})
    monkeypatch.setattr(code_tests.os, "uname", lambda: os.uname_result(("Linux", "here", "6", "1", "riscv64")))
    with pytest.raises(ConfigurationError, match=r"--rm-type code: .* x86_64 and aarch64; this is riscv64"):
        require_sandbox()


# ------------------------------------------------------------------------------------------------------------ sandbox
def test_input_and_output():
    assert run("import sys\nprint(sys.stdin.read().upper())", "ä\nb") == "Ä\nB\n"
    assert run("print(__name__)\nexit()") == "__main__\n"


@pytest.mark.parametrize(
    "source",
    [
        "import numpy\nprint(int(numpy.linalg.det(numpy.eye(50))))",
        "import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    print(1)\nasyncio.run(f())",
        "import sys\nsys.setrecursionlimit(10**6)\nf = lambda n: n and f(n - 1)\nprint(f(20_000) + 1)",
        "import heapq, bisect, decimal, fractions, random, re, time, datetime, json, itertools\nprint(1)",
        f"print(len(open({__file__!r}).read()) and 1)",
    ],
    ids=["numpy", "threads", "asyncio", "recursion", "library", "reading"],
)
def test_computing_is_not_hindered(source: str):
    assert run(source) == "1\n"


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    ],
    ids=["loop", "sleep", "forks", "blocks signals"],
)
def test_a_program_that_does_not_end_is_ended(source: str):
    started = time.monotonic()
    assert run(source, seconds=1.0) is None
    assert time.monotonic() - started < 10.0


def test_output_and_memory_are_bounded():
    assert run("while True: print('x' * 1000)") is None
    assert run("print('x' * 1000)\nx = bytearray(2 << 30)") is None
    assert run("x = bytearray(100 << 20)\nprint(1)") == "1\n"


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("os.fork", ()),
        ("os.posix_spawn", ("/bin/true", ["true"], {})),
        ("os.execv", ("/bin/true", ["true"])),
        ("subprocess.run", (["true"],)),
        ("os.kill", (-1, 0)),  # signal 0: would be harmless if it were let through
        ("os.kill", (os.getpid(), 0)),
        ("socket.socket", ()),
        ("open", ("FILE", "w")),
        ("open", ("FILE", "a")),
        ("open", ("FILE", "r+")),
        ("os.open", ("FILE", os.O_RDONLY | os.O_TRUNC)),
        ("os.truncate", ("FILE", 0)),
        ("os.remove", ("FILE",)),
        ("os.rename", ("FILE", "FILE2")),
        ("os.chmod", ("FILE", 0)),
        ("os.mkdir", ("FILE2",)),
        ("os.symlink", ("FILE", "FILE2")),
        ("os.memfd_create", ("x",)),
        ("resource.setrlimit", (8, (1, 1))),
        ("os.setpriority", (0, 0, 19)),
        ("fcntl.fcntl", (0, 8, 1)),  # F_SETOWN
    ],
)  # fmt: skip
def test_a_program_cannot_touch_what_is_outside(tmp_path: Path, action: str, arguments: tuple[Any, ...]):
    (tmp_path / "file").write_text("kept")
    places = {"FILE": str(tmp_path / "file"), "FILE2": str(tmp_path / "other")}
    call = ", ".join(repr(places.get(a, a) if isinstance(a, str) else a) for a in arguments)
    source = f"""
import fcntl, os, resource, socket, subprocess
try: {action}({call})
except (PermissionError, ValueError) as error: print("refused")
else: print("done")
"""
    assert run(source) == "refused\n"
    assert (tmp_path / "file").read_text() == "kept"
    assert not (tmp_path / "other").exists()


def test_secrets_in_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run("import os\nprint(os.environ.get('WANDB_API_KEY'))") == "None\n"


def test_a_sandbox_that_cannot_be_set_up_is_an_error_not_a_wrong_answer():
    with pytest.raises(RuntimeError, match="the sandbox for code cannot be set up"):
        run("print(1)", memory=1 << 70)
