"""Recipes of other systems beside ours: what ours says is what ``miles-async migrate`` prints, and works.

# covers: P8
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from examples.quickstart.tokenizer import build_tokenizer
from miles_async.arguments.argument_files import without_comment
from miles_async.cli import main
from miles_async.commands.migrate.command import SYSTEMS

EXAMPLES = Path("examples/migrate")
CONFIGS = Path("tests/recipes/configs")
MODELS = {"slime": ("Qwen3-4B", 4), "miles": ("Qwen3-4B", 4), "verl": ("Qwen3-30B-A3B", 8)}  # name, GPUs that train
BY_HAND = "# By hand:"


def flags(text: str) -> set[str]:
    return {shlex.join(shlex.split(line)) for line in map(without_comment, text.splitlines()) if line.startswith("--")}


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_ours_says_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["migrate", str(EXAMPLES / f"{name}.sh")])
    printed = capsys.readouterr().out
    ours, _, by_hand = (EXAMPLES / f"{name}.args").read_text().partition(BY_HAND)
    assert flags(ours) - flags(printed) == set()
    assert flags(by_hand)
    assert "Only the shell knows" not in printed


@pytest.mark.parametrize("name", SYSTEMS)
def test_ours_is_in_order(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, gpus = MODELS[name]
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    build_tokenizer().save_pretrained(model)
    shutil.copyfile(CONFIGS / f"{config}.json", model / "config.json")
    save_file({}, model / "model.safetensors")
    row = {"prompt": [{"role": "user", "content": "rev 12"}], "label": "21", "reward_model": {"ground_truth": "21"}}
    prompts.write_text(f"{json.dumps(row)}\n" * 64)
    here = (
        f"--hf-checkpoint {model} --prompt-data {prompts} --eval-prompt-data aime {prompts} "
        f"--save {tmp_path}/save --load {tmp_path}/save --run-dir {tmp_path}/run --device cpu "
        f"--ray-address local --actor-num-gpus-per-node {gpus}"
    )
    status = main(["train", f"@{EXAMPLES / name}.args", *here.split(), "--dry-run"])
    assert status == 0, capsys.readouterr().err
