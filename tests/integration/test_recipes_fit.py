"""The recipes and presets for GPUs fit into the memory that they are for, and recipes need what their pages say.

# covers: P8
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.commands.plan import plan
from tests.unit.arguments.test_model_presets import CASES, MODELS, config_of
from tests.unit.examples import test_math, test_tasks, test_vision

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.long]

RECIPES = {
    folder / name: model
    for folder, recipes in (
        (test_math.MATH, test_math.RECIPES),
        (test_tasks.TASKS, test_tasks.RECIPES),
        (test_vision.VISION, test_vision.RECIPES),
    )
    for name, model in recipes.items()
}

STAGE_COLUMNS = 11  # of the table of stages, which others follow


def told(recipe: Path) -> str:
    """The row of its folder's page."""
    page = (recipe.parent / "README.md").read_text()
    (row,) = re.findall(rf"^\| \[{re.escape(recipe.name)}\]\(\S+?\).*? \| .+? \| (.+) \|$", page, re.MULTILINE)
    return row


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│ \n").split("│")]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_memory_is_what_the_page_says_and_fits(recipe: Path, tmp_path: Path) -> None:
    config, gpus = RECIPES[recipe]
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    rows = [
        cells(line)
        for line in plan(
            ["--memory", f"@{recipe}.args", "--hf-checkpoint", str(tmp_path), "--ray-address", "local"]
        ).splitlines()
        if line.startswith("│")
    ]
    stages, engine = [row for row in rows if len(row) == STAGE_COLUMNS], rows[-1]
    fullest = max(float(row[-3]) for row in stages)  # the last two columns are of the host's memory
    assert told(recipe).startswith(f"{gpus} | {fullest:.1f} | {engine[1]} | {engine[2]} | {engine[-1]}")


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_a_preset_fits_on_the_gpus_that_it_tells(preset: str, model: str, tmp_path: Path) -> None:
    """With a tenth left free. Else the plan is refused."""
    (tmp_path / "config.json").write_bytes(config_of(model).read_bytes())
    gpus, memory = MODELS[preset][1], 141 if preset == "kimi-k2" else 80
    words = (
        f"--memory @preset:{preset} --hf-checkpoint {tmp_path} --device cuda --ray-address local --rollout-num-gpus 64 "
        f"--actor-num-nodes {max(gpus // 8, 1)} --actor-num-gpus-per-node {min(gpus, 8)} "
        f"--rollout-max-response-len 8192 --gpu-memory-gb {0.9 * memory}"
    )
    assert plan(words.split())
