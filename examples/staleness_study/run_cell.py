"""Runs one cell: a ``miles-async train``, then the accuracy of the weights that it exported."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from examples.quickstart.prepare import GATE_SAMPLES
from examples.quickstart.tasks import SORT
from examples.staleness_study.cells import STEPS, Cell, exported, run_flags
from examples.staleness_study.results import CellResult
from miles_async.observability.metrics_file import FILE_NAME, read_metrics

CELL_SECONDS = 3600.0  # several times what a cell takes on a busy machine
SHUTDOWN_SECONDS = 90.0  # for an interrupted run to stop its engines
TAIL_LINES = 15
DIGITS = 4  # of the numbers that are kept
_EVALUATION = ThreadPoolExecutor(1)  # one at a time: transformers does not stand being imported by two threads


class CellFailedError(Exception):
    """A cell did not come to its end; the message has the last lines that it printed."""


async def run_cell(cell: Cell, run_dir: Path) -> CellResult:
    """Run the cell from its beginning; its output goes to :func:`console_log`. Raises CellFailedError."""
    shutil.rmtree(run_dir, ignore_errors=True)  # half a run: metrics.jsonl would get two beginnings
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    code = await _train(run_flags(cell, run_dir), console_log(run_dir))
    if code != 0:
        tail = console_log(run_dir).read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise CellFailedError("\n    ".join([f"exit code {code}, its last lines:", *tail]))
    greedy, sampled = await asyncio.get_running_loop().run_in_executor(_EVALUATION, accuracies, exported(run_dir))
    return read_result(cell, run_dir, greedy=greedy, sampled=sampled)


def read_result(cell: Cell, run_dir: Path, *, greedy: float, sampled: float) -> CellResult:
    """The result of a finished run. Raises CellFailedError if steps are missing."""
    rows = [row for row in read_metrics(run_dir / FILE_NAME) if row.get("reward/mean") is not None]
    if len(rows) != STEPS:
        raise CellFailedError(f"expected {STEPS} steps in {run_dir / FILE_NAME}, found {len(rows)}")

    def series(name: str) -> list[float | None]:
        return [None if row.get(name) is None else round(row[name], DIGITS) for row in rows]

    return CellResult(
        age=cell.age,
        correction=cell.correction,
        seed=cell.seed,
        fingerprint=cell.fingerprint,
        greedy=greedy,
        sampled=sampled,
        rewards=tuple(value or 0.0 for value in series("reward/mean")),
        grad_norms=tuple(series("train/grad_norm")),
        ess=tuple(value or 0.0 for value in series("train/ess_sequences")),
    )


def console_log(run_dir: Path) -> Path:
    """Beside the run directory, which starts empty."""
    return run_dir.with_name(f"{run_dir.name}.log")


async def _train(flags: list[str], console: Path) -> int:
    """Exit code of ``miles-async train``; if this is cancelled, it is told to stop and waited for.

    Raises CellFailedError after :data:`CELL_SECONDS`.
    """
    with console.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles_async", "train", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        try:
            async with asyncio.timeout(CELL_SECONDS):
                return await process.wait()
        except TimeoutError:
            raise CellFailedError(f"it took longer than {CELL_SECONDS:g} s: {console}") from None
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def accuracies(model_dir: Path) -> tuple[float, float]:
    """Share of right answers to the test prompts: greedy, and sampled at temperature 1."""
    evaluate = _evaluator()
    return round(evaluate(model_dir, 0), DIGITS), round(evaluate(model_dir, GATE_SAMPLES), DIGITS)


@cache
def _evaluator() -> Callable[[Path, int], float]:
    import torch  # here and below: a report needs none of it, and these imports take ten seconds
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    from examples.quickstart.tokenizer import build_tokenizer
    from examples.quickstart.warm_start import accuracy

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # one per model
    tokenizer = build_tokenizer()
    _, test = SORT.split()

    def evaluate(model_dir: Path, samples: int) -> float:
        model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        return accuracy(model, tokenizer, SORT, test, samples=samples)

    return evaluate
