"""The recipes for tools, search, agents and code: data from every shape, flags on their model's config.json.

# covers: P8
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.tasks import prepare
from miles_async.arguments.parser import parse_arguments
from miles_async.rewards import code_tests
from miles_async.types import JsonObject, Prompt
from tests.json_dict import JsonDict
from tests.unit.examples.recipes import CONFIGS, dry_run

TASKS = Path("examples/tasks")
RECIPES = dict.fromkeys(("tools", "search", "agent", "code"), (CONFIGS / "Qwen3-4B.json", 4))  # config, GPUs that train

MBPP = {"text": "Double a number.", "test_list": ["assert double(2) == 4", "assert double(0) == 0"]}
STDIN = {
    "prompt": [{"role": "user", "content": "Add two numbers."}],
    "reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
}
SHAPES: dict[str, tuple[JsonObject, str, JsonObject]] = {
    "question": (
        {"question": "Who?", "golden_answers": ["Ann", "A."]},
        f"Who?\n\n{prepare.SEARCH_FIRST}",
        {"label": ["Ann", "A."]},
    ),
    "one answer": ({"question": "Who?", "answer": "Ann"}, f"Who?\n\n{prepare.SEARCH_FIRST}", {"label": "Ann"}),
    "mbpp": (
        MBPP,
        f"Double a number.\n\n{prepare.WRITE_PROGRAM}\n\nassert double(0) == 0",
        {"metadata": {"tests": MBPP["test_list"]}},
    ),
    "set-up": (
        {**MBPP, "test_setup_code": "import math"},
        f"Double a number.\n\n{prepare.WRITE_PROGRAM}\n\nassert double(0) == 0",
        {"metadata": {"tests": ["import math", *MBPP["test_list"]]}},
    ),
    "input and output": (
        STDIN,
        f"Add two numbers.\n\n{prepare.READ_AND_PRINT}",
        {"metadata": {"tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}},
    ),
}  # fmt: skip


def prepared(row: JsonObject, directory: Path) -> JsonDict:
    source, output = directory / "source.jsonl", directory / "prompts.jsonl"
    source.write_text(json.dumps(row) + "\n")
    assert prepare.main(["mbpp", str(output), "--source", str(source)]) == 0
    (line,) = output.read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_shape(shape: str, tmp_path: Path) -> None:
    row, content, rest = SHAPES[shape]
    made = prepared(row, tmp_path)
    assert made.pop("prompt") == [{"role": "user", "content": content}]
    assert made.pop("id")
    assert made == rest
    if "metadata" in rest:
        prompt = Prompt(prompt_id="a", token_ids=(1,), text=content, label=None, metadata=made["metadata"])
        assert code_tests.tests_of(prompt), "the reward can run them"


@pytest.mark.parametrize(
    ("row", "problem"),
    [('{"x": 1}', "its columns x are of no data set"), ('{"question": "Who?", "golden_answers": []}', "ValueError")],
)
def test_a_wrong_row_is_named(row: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(row)
    assert prepare.main(["mbpp", str(tmp_path / "out.jsonl"), "--source", str(source)]) == 2
    assert re.search(f"row 1: .*{problem}", capsys.readouterr().err)


def test_every_recipe_is_checked_here() -> None:
    assert set(RECIPES) | {"tasks"} == {file.stem for file in TASKS.glob("*.args")}


@pytest.mark.parametrize("name", RECIPES)
def test_the_dry_run_of_a_recipe_ends_in_order(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine without GPUs. That it fits into theirs is tested at night."""
    config, gpus = RECIPES[name]
    monkeypatch.setenv("SEARCH_ENDPOINTS", "http://127.0.0.1:8000")
    recipe = TASKS / f"{name}.args"
    assert parse_arguments([f"@{recipe}"]).arguments.cluster.trainer_world_size == gpus
    status = dry_run(recipe, config, tmp_path, "--gpu-memory-gb none")
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "are in order" in shown.out
