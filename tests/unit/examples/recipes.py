"""Dry runs of recipes on one machine, without their GPUs and weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

from examples.quickstart.tokenizer import build_tokenizer
from miles_async.cli import main

CONFIGS = Path("tests/recipes/configs")
ROW = {
    "prompt": [{"role": "user", "content": "rev 12"}],
    "label": "21",
    "metadata": {"tests": ["x"]},
    "reward_model": {"ground_truth": "21"},
}


def dry_run(recipe: Path, config: Path, folder: Path, flags: str) -> int:
    """Exit status of a dry run with the config.json of the recipe's model, and 64 prompts. ``flags``: more of them."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    build_tokenizer().save_pretrained(model)
    shutil.copyfile(config, model / "config.json")
    save_file({}, model / "model.safetensors")
    prompts.write_text("".join(json.dumps({"id": str(number), **ROW}) + "\n" for number in range(64)))
    here = (
        f"--hf-checkpoint {model} --prompt-data {prompts} --eval-prompt-data eval {prompts} --save {folder}/save "
        f"--run-dir {folder}/run --device cpu {flags}"
    )
    return main(["train", f"@{recipe}", *here.split(), "--dry-run"])
