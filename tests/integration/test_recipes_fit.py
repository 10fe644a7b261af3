"""The recipes of examples/math fit into the memory of the GPUs that they are for, and need what their page says.

# covers: P8
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.commands.plan import plan
from tests.unit.examples.test_math import MATH, RECIPES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.long]

TOLD = dict(re.findall(r"^\| \[(.+?)\]\(\S+?\) \| .+? \| (.+) \|$", (MATH / "README.md").read_text(), re.MULTILINE))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│ \n").split("│")]


@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_what_the_page_says_and_fits(name: str, tmp_path: Path) -> None:
    config, gpus = RECIPES[name]
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    rows = [
        cells(line)
        for line in plan(
            ["--memory", f"@{MATH / name}.args", "--hf-checkpoint", str(tmp_path), "--ray-address", "local"]
        ).splitlines()
        if line.startswith("│")
    ]
    stages, (engine,) = rows[:-1], rows[-1:]
    fullest = max(stages, key=lambda row: float(row[-1]))
    assert TOLD[name] == f"{gpus} | {fullest[-1]} | {engine[1]} | {engine[2]} | {engine[-1]}"
