"""Rows that another process writes: only rows are read, and anything else is refused with the flag."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.integrations.generate_rows import generated_rows, rows_of

ENVIRONMENT = """
import gymnasium, subprocess
from gymnasium.spaces import Text

class Loud(gymnasium.Env):
    observation_space = action_space = Text(9)
    def __init__(self):
        subprocess.run(["echo", "stray"])
    def reset(self, *, seed=None, options=None):
        return f"a\\u2028b {seed}", {}

gymnasium.register("Loud-v0", entry_point=Loud)
"""


def test_what_processes_of_a_package_print_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = generated_rows("gymnasium", "loud:Loud-v0", {}, 1, 3)
    assert row == {"prompt": "a\u2028b 3", "metadata": {"seed": 3}}


@pytest.mark.parametrize("written", [b"hello", b'"\xff"'])
def test_what_is_no_row_is_refused_with_the_flag(written: bytes) -> None:
    command = [sys.executable, "-c", f"import sys; sys.stdout.buffer.write({written!r})"]
    with pytest.raises(ConfigurationError, match="--environment a:b: expected its prompts as JSON lines: "):
        rows_of(command, "--environment a:b", os.environ)
