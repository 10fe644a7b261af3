"""The mathematical recipes: their data from every shape that data sets have, their flags on their models' config.json.

# covers: P8
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from examples.math import prepare
from miles_async.arguments.parser import parse_arguments
from miles_async.types import JsonObject
from tests.unit.examples.recipes import CONFIGS, dry_run

MATH = Path("examples/math")

# Recipe → config.json of its model, GPUs that train.
RECIPES = {
    "qwen3-4b": (CONFIGS / "Qwen3-4B.json", 4),
    "llama-3.1-8b": (CONFIGS / "Llama-3.1-8B-Instruct.json", 8),
    "llama-3.1-8b-lora": (CONFIGS / "Llama-3.1-8B-Instruct.json", 4),
    "gpt-oss-20b": (CONFIGS / "gpt-oss-20b.json", 8),
    "qwen3-30b-a3b": (CONFIGS / "Qwen3-30B-A3B.json", 16),
    "qwen3-235b-a22b": (CONFIGS / "Qwen3-235B-A22B.json", 64),
    "glm-4.5": (CONFIGS / "GLM-4.5.json", 64),
    "glm-4.7": (CONFIGS / "GLM-4.7-355B-A32B.json", 64),
    "deepseek-v3": (CONFIGS / "DeepSeek-R1.json", 128),
    "kimi-k2": (Path("examples/one_trillion/config.json"), 512),
}

DAPO = {
    "prompt": [{"content": 'Solve it. Answer: $Answer\n\nWhat is 1 + 1?\n\nRemember "Answer:".', "role": "user"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
}
SHAPES: dict[str, tuple[JsonObject, str, str]] = {
    "dapo": (DAPO, DAPO["prompt"][0]["content"], "2"),
    "slime": ({"prompt": "Solve 2 + 2.", "label": "4"}, "Solve 2 + 2.", "4"),
    "gsm8k": (
        {"question": "Ann has 1,000 apples and gets 34.", "answer": "She has <<1000+34=1034>>1034.\n#### 1,034"},
        f"Ann has 1,000 apples and gets 34.\n\n{prepare.INSTRUCTION}",
        "1034",
    ),
    "aime": ({"id": 60, "problem": "Find $x$.", "answer": 204}, f"Find $x$.\n\n{prepare.INSTRUCTION}", "204"),
    "aime-capitals": ({"ID": "I-1", "Problem": "Find.", "Answer": 7}, f"Find.\n\n{prepare.INSTRUCTION}", "7"),
}


def prepared(source: Path, output: Path) -> list[JsonObject]:
    assert prepare.main(["gsm8k", str(output), "--source", str(source)]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_every_shape(shape: str, suffix: str, tmp_path: Path) -> None:
    row, prompt, label = SHAPES[shape]
    source = tmp_path / f"source{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), source)
    else:
        source.write_text(f"{json.dumps(row)}\n" * 2)
    (made,) = prepared(source, tmp_path / "made" / "prompts.jsonl")
    assert made["prompt"] == [{"role": "user", "content": prompt}]
    assert made["label"] == label
    assert made["id"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"question": "1 + 1?", "answer": "2"}', "row 1: its answer has no ####"),
        ('{"problem": "Find.", "answer": 1}\n{"x": 1, "y": 2}', "row 2: its columns x, y are of no data set"),
        ('{"problem": " ", "answer": 1}', "row 1: its question or its answer is empty"),
        ('{"prompt": [], "label": "1"}', "row 1: it is not what its columns say (IndexError"),
        ('{"problem": "Find.", "answer": 1}\n{', ":2: Expecting"),
        ("", "there is no row in it"),
    ],
)
def test_wrong_rows_are_named_and_nothing_is_written(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "source.jsonl", tmp_path / "out" / "prompts.jsonl"
    source.write_text(text)
    assert prepare.main(["aime-2024", str(output), "--source", str(source)]) == 2
    assert expected in capsys.readouterr().err
    assert list(output.parent.iterdir()) == []


def test_a_hub_out_of_reach_and_a_broken_file_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(prepare, "hf_hub_download", unreachable)
    assert prepare.main(["gsm8k", str(tmp_path / "prompts.jsonl")]) == 2
    assert "openai/gsm8k (no connection); get it elsewhere and name it with --source" in capsys.readouterr().err
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert prepare.main(["gsm8k", str(tmp_path / "prompts.jsonl"), "--source", str(tmp_path / "broken.parquet")]) == 2
    assert "broken.parquet" in capsys.readouterr().err


def test_every_recipe_is_checked_here() -> None:
    assert set(RECIPES) | {"math"} == {file.stem for file in MATH.glob("*.args")}


@pytest.mark.parametrize("name", RECIPES)
def test_the_dry_run_of_a_recipe_ends_in_order(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one machine without GPUs. That it fits into theirs is tested at night."""
    config, gpus = RECIPES[name]
    recipe = MATH / f"{name}.args"
    assert parse_arguments([f"@{recipe}"]).arguments.cluster.trainer_world_size == gpus
    here = f"--gpu-memory-gb none --ray-address local --actor-num-nodes 1 --actor-num-gpus-per-node {gpus}"
    status = dry_run(recipe, config, tmp_path, here)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "are in order" in shown.out
