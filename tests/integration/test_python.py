"""Runs from Python: the example of docs/python.md and the notebook, as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.prepare import ASSETS, prepare
from examples.quickstart.tasks import TASKS
from miles_async.runtime.processes.run_process import find_marked, read_run_process
from tests.integration.real_run import ROOT

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(420)]

SECONDS = 360


@pytest.fixture(autouse=True)
def _prompts() -> None:
    prepare(TASKS["reverse"], ASSETS / "reverse")


def in_place(source: str, name: str, run_dir: Path) -> str:
    """The source with a run directory of the test."""
    assert name in source
    return source.replace(name, str(run_dir))


def printed(source: str, folder: Path) -> list[str]:
    """The lines that a program prints."""
    program = folder / "example.py"
    program.write_text(source)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    lines = printed(in_place(source, "runs/python", tmp_path / "run"), tmp_path)
    steps, (learned, *wrong) = lines[:5], lines[5:]
    assert [line.split()[0] for line in steps] == ["1", "2", "3", "4", "5"]
    assert all(0 < float(line.split()[1]) <= 1 for line in steps)
    first, last = map(float, learned.split(" → "))
    assert 0 < first < last
    assert wrong
    assert all(re.fullmatch(r".*rev \d+.* [\d.]+", line) for line in wrong)
    assert find_marked(read_run_process(tmp_path / "run")) == []


ASKS_AGAIN = """
import asyncio
import miles_async
from miles_async.types import Observation

class AsksTwice:
    def __init__(self, prompt):
        self.prompt = prompt
    def tools(self):
        return []
    async def step(self, turn):
        again = {"role": "user", "content": self.prompt.text}
        right = float(turn.text == self.prompt.label)
        return Observation(messages=() if turn.index else (again,), done=turn.index == 1, reward=right)
    async def close(self):
        pass

def skips(group):
    return "every fourth" if group.attempt.attempt_id % 4 == 0 else None

async def main():
    flags = {"num_rollout": 3, "rollout_max_response_len": 40, "max_tokens_per_turn": 7, "eval_interval": None}
    config = miles_async.Config.from_args(
        ["@examples/quickstart/reverse.args"], run_dir="RUN", save_hf=None, use_wandb=False, lr_warmup_iters=0, **flags
    )
    run = miles_async.start(config, environment=AsksTwice, group_filter=skips)
    async for row in run.metrics():
        if row["kind"] == "step":
            print(row["step"], row["rollout/turns/mean"])
    summary = run.wait()
    print(summary["balanced"], summary["groups"]["filtered"] > 0)

asyncio.run(main())
"""


def test_a_class_of_the_program_is_the_environment_of_its_run(tmp_path: Path) -> None:
    *steps, ending = printed(ASKS_AGAIN.replace("RUN", str(tmp_path / "run")), tmp_path)
    assert steps == ["1 2.0", "2 2.0", "3 2.0"]
    assert ending == "True True"


def test_the_notebook_trains_the_quick_start(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.reads((ROOT / "examples/notebook/quickstart.ipynb").read_text(), as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("runs/notebook", str(tmp_path / "run"))
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": ROOT / "examples/notebook"}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    (plot,) = (output for output in outputs if output.output_type == "display_data")
    assert "image/png" in plot.data
    results = [output.data["text/plain"] for output in outputs if output.output_type == "execute_result"]
    first, last, _ = re.findall(r"[\d.]+", next(text for text in results if text.startswith("(")))[:3]
    assert float(last) > float(first) + 0.3
    assert "response" in results[-1]
    assert find_marked(read_run_process(tmp_path / "run")) == []
