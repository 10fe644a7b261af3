"""Functions and classes of a program reach the processes of a run, or are refused with what to do."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.runs.carried import HOOKS, LARGEST_MIB, MODULE, by_argument, carry
from miles_async.runs.starting import start
from miles_async.runtime.files.run_directory import CODE_DIRECTORY
from miles_async.runtime.hooks import load_object

PROGRAM = """
import sys
from miles_async.runs.carried import carry
from pathlib import Path

BONUS = 0.5

class Reward:
    def __init__(self, scale):
        self.scale = scale
    async def __call__(self, prompt, sample):
        return self.scale * helper(sample)

class Turns:
    async def reset(self, prompt): ...

def helper(sample):
    return len(sample) + BONUS

carried = carry({"reward": Reward(2), "environment": Turns, "group_filter": None})
carried.write(Path(sys.argv[1]))
print(*carried.words)
"""
READER = """
import asyncio, inspect
from miles_async_carried import environment, reward
assert inspect.isclass(environment) and environment.__name__ == "Turns"
print(asyncio.run(reward(None, "abc")))
"""


def run(program: str, *words: str, path: Path | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, env=environment).stdout


def test_what_a_main_module_defines_is_loaded_by_another_process(tmp_path: Path) -> None:
    words = run(PROGRAM, str(tmp_path))
    assert words.split() == [
        *("--rm-type", "none", "--custom-rm-path", f"{MODULE}:reward"),
        *("--environment-path", f"{MODULE}:environment"),
    ]
    assert float(run(READER, path=tmp_path / CODE_DIRECTORY)) == 7.0


def test_what_can_be_imported_is_named() -> None:
    carried = carry({"generate": load_object, "agent": "my_module:my_agent", "reward": None})
    assert carried.words == (
        *("--custom-generate-function-path", "miles_async.runtime.hooks:load_object"),
        *("--agent-path", "my_module:my_agent"),
    )
    assert carried.code == b""


def test_the_page_has_every_argument_with_its_flag() -> None:
    page = (Path(__file__).parents[3] / "docs/python.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `(--[\w-]+-path)`", page, re.MULTILINE)
    assert dict(listed) == {name: words[-1] for name, words in HOOKS.items()}
    assert HOOKS.keys() == inspect.signature(start).parameters.keys() - {"config"}


def test_errors_name_the_argument_that_carried_a_hook() -> None:
    said = f"--custom-rm-path {MODULE}:reward is not a Reward; --agent-path {MODULE}:agent: it must be async"
    assert by_argument(said) == "reward=... is not a Reward; agent=...: it must be async"
    assert by_argument("--custom-rm-path my_module:reward") == "--custom-rm-path my_module:reward"


def test_code_of_a_start_that_was_killed_is_replaced(tmp_path: Path) -> None:
    for bonus in (1, 2):
        carry({"reward": lambda bonus=bonus: bonus}).write(tmp_path)
    program = f"import {MODULE}; print({MODULE}.reward())"
    assert run(program, path=tmp_path / CODE_DIRECTORY) == "2\n"


def test_what_cannot_be_pickled_is_refused_with_what_to_do() -> None:
    lock = threading.Lock()
    with pytest.raises(
        ConfigurationError, match=r"reward=.*cannot be carried.*lock.*when it is called.*my_module:"
    ) as error:
        carry({"reward": lambda: lock})
    assert "TypeError" in str(error.value)


def test_large_data_is_refused_with_what_to_do() -> None:
    data = bytes((LARGEST_MIB + 1) << 20)
    with pytest.raises(
        ConfigurationError, match=rf"refers to {LARGEST_MIB + 1} MiB of data.*Read the data from a file"
    ):
        carry({"environment": lambda: data})
