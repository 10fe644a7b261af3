"""Recipes of other systems beside ours: what ours says is what ``miles-async migrate`` prints, and works.

# covers: P8
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
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


def test_a_launch_script_in_python_prints_its_command_and_does_nothing(tmp_path: Path) -> None:
    utilities = tmp_path / "miles" / "utils" / "external_utils" / "command_utils.py"
    utilities.parent.mkdir(parents=True)
    utilities.write_text(
        "def exec_command_cpu(command): raise SystemExit('it ran')\n"
        "def hf_download_dataset(name): exec_command_cpu(name)\n"
        "def execute_train(train_args, num_gpus_per_node, train_script='train.py'): exec_command_cpu('ray')\n"
    )
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, miles.utils.external_utils.command_utils as U\n"
        "U.hf_download_dataset('gsm8k')\n"
        "U.execute_train(f'--lr 1e-6 \\n--num-rollout {sys.argv[1]}', 8, train_script='train_async.py')\n"
    )
    words = [sys.executable, str(EXAMPLES / "miles_command.py"), str(script), "7"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("python3 train_async.py --lr 1e-6  --num-rollout 7\n", "")
