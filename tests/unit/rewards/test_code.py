"""Programs of the model are judged by their tests, and can do no harm."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import structlog

from miles_async.arguments import RewardArguments
from miles_async.errors import ConfigurationError, RewardError, ServiceUnavailableError
from miles_async.rewards import code_tests, confinement
from miles_async.rewards.code_tests import code_reward, last_program, sandbox_level
from miles_async.rewards.confinement import landlock_version
from miles_async.rewards.hub import OneReward, RewardHub
from miles_async.rewards.programs import Limits, run_program, run_statements
from miles_async.rewards.workers import WorkerPool
from miles_async.runtime.services import Services
from miles_async.types import Prompt
from tests.property.builders import make_sample

SUMS = {"inputs": ["1 2\n", "10 -3"], "outputs": ["3", "7\n"]}
MIB = 1 << 20
BEST = "landlock" if landlock_version() else "seccomp"


LEVELS = ["seccomp", pytest.param("landlock", marks=pytest.mark.skipif(not landlock_version(), reason="no Landlock"))]


def limits(seconds: float = 30.0, memory: int = 1024 * MIB, level: str = BEST) -> Limits:
    return Limits(seconds=seconds, memory_bytes=memory, level=level)


def run(source: str, text: str = "", **options: object) -> str | None:
    return run_program(source, text, limits(**options))


def prompt(tests: object = None, label: str | None = None) -> Prompt:
    return Prompt(
        prompt_id="p:1", token_ids=(1,), text="", label=label, metadata={} if tests is None else {"tests": tests}
    )


# ------------------------------------------------------------------------------------------------------------ judging
@asynccontextmanager
async def judging(timeout: float = 60.0, **options: object) -> AsyncIterator[OneReward]:
    workers = WorkerPool(2, timeout)
    try:
        yield partial(code_reward, workers, lambda: limits(**options), timeout)
    finally:
        await workers.close()


@pytest.fixture
async def reward() -> AsyncIterator[OneReward]:
    async with judging() as made:
        yield made


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
async def test_a_program_is_right_if_it_prints_what_every_test_expects(reward: OneReward, program: str, right: float):
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
async def test_a_program_is_right_if_no_statement_after_it_fails(reward: OneReward, program: str, right: float):
    tests = ["assert double(2) == 4", "assert double(0) == 0"]
    assert await reward(prompt(tests), make_sample([0], text=f"```py\n{program}\n```")) == right
    assert await reward(prompt(label=json.dumps(tests)), make_sample([0], text=f"```\n{program}\n```")) == right


@pytest.mark.parametrize(
    "response",
    [
        "Sample:\n```plaintext\n1 2\n```\nSolution:\n```python\nright()\n```",
        "```bash\npip install x\n```\nthen\n```Python\nright()\n```",
        "```python\nright()\n```\nOutput:\n```\n1\n```\nas JSON:\n```json\n1\n```",
        "```py title=a.py\nright()\n```",
        "```\nwrong()\n```\n```\nright()\n```",
    ],
)
def test_the_program_is_the_last_block_of_python(response: str):
    assert last_program(response) == "right()\n"


def test_a_block_of_another_language_is_no_program():
    assert last_program("```json\n1\n```") is None


@pytest.mark.parametrize("tests", [["assert total([1, 2]) == 3"], {"inputs": ["1 2"], "outputs": ["3"]}], ids=str)
async def test_programs_may_have_data_classes_and_annotations_without_imports(reward: OneReward, tests: object):
    program = """
from dataclasses import dataclass
from typing import ClassVar
@dataclass
class Sum:
    value: int
    cache: ClassVar[dict] = {}
def total(numbers: List[int]) -> Optional[int]:
    return Sum(sum(numbers)).value
if __name__ == "__main__" and (line := input() if tests_read else ""):
    print(total(map(int, line.split())))
""".replace("tests_read", str(isinstance(tests, dict)))
    assert await reward(prompt(tests), make_sample([0], text=f"```python\n{program}\n```")) == 1.0


@pytest.mark.parametrize(
    ("program", "statement", "right"),
    [
        (
            "class math: isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
            "assert math.isclose(f(2), 4)",
            0.0,
        ),
        ("import math\ndef f(x): return 2 * x", "assert math.isclose(f(2), 4)", 1.0),
        ("import math\ndef f(x): return 0", "assert math.isclose(f(2), 4)", 0.0),
        ("import cmath as math\ndef f(x): return 0", "assert math.isclose(f(2), 4)", 0.0),
        ("import numpy as np\ndef f(x): return np.array([x])", "assert np.allclose(f(2), [2])", 1.0),
        ("class np: allclose = print\ndef f(x): return 0", "assert not np.allclose(f(2), [2])", 0.0),
        ("def queue(x): return x", "assert queue(2) == 2", 1.0),  # a function's name may be a module's
    ],
)
async def test_a_program_cannot_stand_in_for_a_module_of_its_tests(
    reward: OneReward, program: str, statement: str, right: float
):
    assert await reward(prompt([statement]), make_sample([0], text=f"```python\n{program}\n```")) == right


def test_buffers_of_sockets_are_bounded():
    program = """
import socket
pairs = []
while len(pairs) < 1000:
    pairs.append(socket.socketpair())
print(len(pairs))
"""
    assert run(program) is None


async def test_a_response_without_a_program_is_wrong(reward: OneReward):
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
async def test_a_row_without_tests_is_an_error(reward: OneReward, tests: object, label: str | None, message: str):
    with pytest.raises(RewardError, match=message):
        await reward(prompt(tests, label), make_sample([0], text="```\n```"))


async def test_a_program_too_slow_for_all_its_tests_is_wrong_and_leaves_no_process():
    slow = {"inputs": ["x"] * 10, "outputs": ["1"] * 10}
    running: list[psutil.Process] = []
    async with judging(timeout=2.0) as reward:
        sleeps = make_sample([0], text="```\nimport time\ntime.sleep(1)\nprint(1)```")
        call = asyncio.create_task(reward(prompt(slow), sleeps))
        while not running and not call.done():
            running = confined()
            await asyncio.sleep(0.02)
        assert await call == 0.0  # a score: an error would count towards quarantine
        loops = make_sample([0], text="```\ndef f():\n while 1: pass\n```")
        assert await reward(prompt(["assert f() == 1"]), loops) == 0.0
    assert running
    assert not psutil.wait_procs(running, timeout=10)[1]


def confined() -> list[psutil.Process]:
    """Programs that descendants of ours run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if any("miles_async.rewards.sandbox" in word for word in process.cmdline()):
                found.append(process)
    return found


def test_the_sandbox_of_this_machine_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confinement, "landlock_version", lambda: 3)
    assert (sandbox_level("auto"), sandbox_level("strict"), sandbox_level("off")) == ("landlock", "landlock", "off")
    monkeypatch.setattr(confinement, "landlock_version", lambda: 0)
    with structlog.testing.capture_logs() as logs:
        assert sandbox_level("auto") == "seccomp"
    assert [(entry["log_level"], "no Landlock" in entry["event"]) for entry in logs] == [("warning", True)]
    with pytest.raises(ConfigurationError, match="--reward-sandbox strict: expected a kernel with Landlock"):
        sandbox_level("strict")
    with pytest.raises(ConfigurationError, match="expected a kernel with Landlock"):
        RewardHub(RewardArguments(rm_type="code", reward_sandbox="strict"), Services())
    monkeypatch.setattr(code_tests.os, "uname", lambda: os.uname_result(("Linux", "here", "6", "1", "riscv64")))
    with pytest.raises(ConfigurationError, match=r"--reward-sandbox auto: .* x86_64 and aarch64; this is riscv64"):
        sandbox_level("auto")


# ------------------------------------------------------------------------------------------------------- statements
PROGRAM = """
import collections, heapq
from fractions import Fraction
import numpy as np

class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)

def double(n): return 2 * n
def counts(text): return collections.Counter(text)
def fails(n): raise ValueError("negative")
def apply(function, *values, **named): return [function(value, **named) for value in values]
def squares(n): return (i * i for i in range(n))
def halves(n): return Fraction(n, 2)
def big(n): return 10 ** n
def vector(n): return np.arange(n) * np.float32(0.5)
def same(value): return value
def node(n): return Node(n)

class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __eq__(self, other): return self.value == other.value
"""


@pytest.mark.parametrize(
    "statements",
    [
        "assert double(2) == 4\nassert not double(0)",
        "def check(f):\n    assert f(3) == 6\n    assert [f(i) for i in (1, 2)] == [2, 4]\ncheck(double)",
        "assert counts('aab') == {'a': 2, 'b': 1}",
        "try: fails(-1)\nexcept ValueError as error: assert str(error) == 'negative'\nelse: assert False",
        "assert apply(lambda x, plus: x + plus, 1, 2, plus=3) == [4, 5]",
        "assert apply(len, 'a', (1, 2)) == [1, 2]\nassert apply(double, 4) == [8]",
        "assert list(squares(4)) == [0, 1, 4, 9]\nassert sum(squares(3)) == 5\nassert next(squares(3)) == 0",
        "from fractions import Fraction\nassert halves(3) == Fraction(3, 2)\nassert abs(halves(3) - 1.5) < 1e-9",
        "assert big(5000) == 10 ** 5000",
        "import numpy\nassert numpy.allclose(vector(3), [0, 0.5, 1])\nassert vector(2)[1] == 0.5",
        "s = Stack()\ns.push(3)\ns.push('x')\nassert s.pop() == 'x'\nassert len(s) == 1 and s.items == [3]",
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
        "assert node(3) == Node(3) and node(3) != Node(4)\nn = node(1); n.next = node(2); assert n.next.value == 2",
        "for value in (None, True, -1, 1.5, float('inf'), 'ä', b'x', (1, [2]), {3}, {'k': (4,)}, range(3), 2j):\n"
        "    assert same(value) == value and type(same(value)) is type(value)",
        "assert heapq.nsmallest(1, [3, 1]) == [1]  # a module that the program has imported",
    ],
)
def test_statements_use_the_program_as_if_it_were_theirs(statements: str):
    assert run_statements(PROGRAM, statements, limits())


@pytest.mark.parametrize(
    "statements",
    [
        "assert double(2) == 5",
        "assert double(2) == 4\nassert absent(1)",
        "double(2",
        "raise SystemExit(42)",
        "fails(1)",
        "assert double",  # fine; what follows is not
    ],
)
def test_a_statement_that_fails_is_a_failure(statements: str):
    more = "\nassert Stack() == 3" if statements == "assert double" else ""
    assert not run_statements(PROGRAM, statements + more, limits())


EXPECTED = "assert answer(1) == 'dGhlIGFuc3dlcg'\nassert answer(2) == 'c2VjcmV0'"


@pytest.mark.parametrize(
    "cheat",
    [
        # leaving with the judge's status, or with any other
        *(f"import os\nos._exit({status})" for status in (0, 42)),
        "raise SystemExit(42)",
        "def answer(n): import os; os._exit(42)",
        "def answer(n): raise SystemExit(42)",
        # equal to everything
        "class Any:\n    def __eq__(self, other): return True\nanswer = lambda n: Any()",
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = None\nanswer = lambda n: Any('x')",
        "class Any(str):\n    __class__ = int\n    def __index__(self): return 3\nanswer = lambda n: Any('x')",
        # other builtins, other exceptions
        "import builtins\nbuiltins.AssertionError = builtins.eq = None\nanswer = lambda n: None",
        "def compare(*_): return True\nimport operator\noperator.eq = compare\nanswer = lambda n: None",
        # the frames and objects of its own process
        "import gc, sys\ndef answer(n):\n"
        "    texts, frame = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))], sys._getframe()\n"
        "    while frame: texts.append(frame.f_locals); frame = frame.f_back\n"
        "    import re\n"
        "    for text in map(repr, texts):\n"
        "        for found in re.findall(r'[\"\\']((?:dG|c2)\\w{6,12})[\"\\']', text): return found",
        # answers before questions, to all descriptors
        "import os, json\nfor fd in range(3, 20):\n"
        "    message = json.dumps(['answer', True]).encode() + b'\\n'\n"
        "    try: os.write(fd, message * 9)\n"
        "    except OSError: pass\nanswer = lambda n: True",
        # calls of the judge's functions instead of answers
        "import os, json\nfor fd in range(3, 20):\n"
        "    for call in (['builtin', 'exec'], ['yours', 0], ['yours', -1], ['module', 'os']):\n"
        "        call = ['call', [call, ['list', ['import os; os._exit(42)']], ['dict', []]]]\n"
        "        message = json.dumps(call).encode() + b'\\n'\n"
        "        try: os.write(fd, message)\n"
        "        except OSError: pass\nanswer = lambda n: exec",
    ],
)  # fmt: skip
def test_no_program_passes_without_the_answers(cheat: str):
    assert not run_statements(cheat, EXPECTED, limits())
    assert run_statements("answer = lambda n: ['dGhlIGFuc3dlcg', 'c2VjcmV0'][n - 1]", EXPECTED, limits())


READS_ITS_PARENT = """
import ctypes, os
found = []
for pid in {os.getppid(), *map(int, filter(str.isdigit, os.listdir("/proc")))} if LIST else {os.getppid()}:
    for name in ("environ", "cmdline", "maps", "mem"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if name != "mem" and "canary" in file.read().decode(errors="replace"): found.append(name)
                if name == "mem": found.append("mem")
        except OSError: pass
    try: os.readlink(f"/proc/{pid}/exe") and found.append("exe")
    except OSError: pass
for number in (101, 310, 438):  # ptrace, process_vm_readv, pidfd_getfd
    if ctypes.CDLL(None).syscall(number, 16, os.getppid(), 0, 0, 0, 0) == 0: found.append(number)
print("LEAKED" if found else "nothing", found)
"""


@pytest.mark.parametrize("level", LEVELS)
async def test_a_program_reads_neither_environment_nor_memory_of_the_process_that_judges_it(
    level: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_API_KEY", "canary")
    test = {"inputs": [""], "outputs": ["nothing []"]}
    program = READS_ITS_PARENT.replace("LIST", "False")
    async with judging(level=level) as reward:
        assert await reward(prompt(test), make_sample([0], text=f"```python\n{program}\n```")) == 1.0


@pytest.mark.skipif(not landlock_version(), reason="no Landlock")
def test_with_landlock_a_program_reads_libraries_only(tmp_path: Path):
    (tmp_path / "labels.jsonl").write_text("secret")
    places = [str(tmp_path / "labels.jsonl"), __file__, "/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "/proc"]
    source = f"""
import os
for place in {places!r}:
    try: os.listdir(place) if place == "/proc" else open(place).read()
    except PermissionError: pass
    else: print(place)
print(len(open(os.__file__).read()) > 0)
"""
    assert run(source, level="landlock") == "True\n"


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
        "import os\nprint(len(open(os.__file__).read()) and 1)",
    ],
    ids=["numpy", "threads", "asyncio", "recursion", "library", "reading"],
)
@pytest.mark.parametrize("level", [*LEVELS, "off"])
def test_computing_is_not_hindered(source: str, level: str):
    assert run(source, level=level) == "1\n"


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    ],
    ids=["loop", "sleep", "forks", "blocks signals"],
)
def test_a_program_that_does_not_end_is_ended(source: str):
    assert run(source, seconds=1.0) is None  # or the test ends at its own limit


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
def test_a_program_cannot_touch_the_outside(tmp_path: Path, action: str, arguments: tuple[object, ...]):
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


@pytest.mark.parametrize("address", [5 << 32, (5 << 32) + 4096])
def test_a_program_sets_no_limits_of_other_processes_from_any_address(address: int):
    """Whose lower half is zero, too: the filter sees halves."""
    source = f"""
import ctypes
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
found = library.mmap({address}, 4096, 3, 0x32, -1, 0)  # readable, writable; private, anonymous, fixed
library.prlimit.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
refused = library.prlimit(int(input()), 4, found, None) == -1 and ctypes.get_errno()
print(found == {address}, refused, library.prlimit(0, 4, None, None))
"""
    with subprocess.Popen(["sleep", "60"]) as other:
        found = run(source, str(other.pid))
        other.kill()
    assert found == f"True {errno.EPERM} 0\n"


def test_secrets_in_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run("import os\nprint(os.environ.get('WANDB_API_KEY'))") == "None\n"


def test_a_program_that_spoils_its_output_is_wrong_and_no_error():
    assert run("import os\nos.lseek(1, 0, 0)\nos.write(1, b'x')") == "x"
    assert not run_statements("import os\nos.lseek(1, 0, 0)\nos.write(1, b'x')\nos._exit(1)", "assert f()", limits())


def test_a_time_limit_that_is_over_before_the_program_starts_is_no_error():
    assert run("print(1)", seconds=0.001) is None
    assert not run_statements("f = int", "assert True", limits(seconds=0.001))
    assert not run_statements("f = int", "no Python", limits())  # the judge ends before the program starts


def test_a_sandbox_that_cannot_be_set_up_is_an_error_not_a_wrong_answer():
    with pytest.raises(ServiceUnavailableError, match="the sandbox for code cannot be set up"):
        run("print(1)", memory=1 << 70)


async def test_a_sandbox_that_cannot_be_set_up_says_nothing_about_the_sample():
    # covers: C6
    async with judging(memory=1 << 63) as reward:
        with pytest.raises(ServiceUnavailableError, match="the sandbox for code cannot be set up"):
            await reward(prompt(SUMS), make_sample([0], text="```\n1\n```"))
