"""Recipes of other systems beside ours: what ours says is what ``miles-async migrate`` prints, and works.

# covers: P8
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from miles_async.arguments.argument_files import without_comment
from miles_async.cli import main
from miles_async.commands.migrate.command import SYSTEMS
from tests.unit.examples.recipes import CONFIGS, dry_run

EXAMPLES = Path("examples/migrate")
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
    here = f"--load {tmp_path}/save --ray-address local --actor-num-gpus-per-node {gpus}"
    status = dry_run(EXAMPLES / f"{name}.args", CONFIGS / f"{config}.json", tmp_path, here)
    assert status == 0, capsys.readouterr().err
