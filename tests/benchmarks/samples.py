"""What samples on disk (``--save-samples``) cost: the quick start with and without them, in pairs, and the recorder's
thread alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.samples.reader import samples_files
from miles_async.samples.recorder import SampleRecorder
from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import tabulate
from miles_async.types import NO_VERSION, Attempt, Group, Prompt, Sample
from tests.benchmarks.quickstart_overlap import run_cell
from tests.benchmarks.report import RESULTS, Row

REWARD = ("--rm-type", "exact_match", "--custom-rm-path", "none")  # not a slow one
CELLS = {"samples": ("--save-samples", "2"), "none": ("--save-samples", "0")}
SHAPES = ((8, 20), (8, 4096), (16, 16384))  # samples of a group, tokens of a response
GROUPS, BATCH, STEPS = 2, 32, 5
PROMPT = 64  # tokens
VOCABULARY = 50_000


def rows(pairs: int = 4, steps: int = 40) -> Iterator[Row]:
    """A row per pair, of which every other one begins without samples; the last row has the medians."""
    prepare_quickstart(["--task", "reverse"])
    seconds: dict[str, list[float]] = {name: [] for name in CELLS}
    for pair in range(pairs):
        order = list(CELLS) if pair % 2 else list(CELLS)[::-1]
        measured = {}
        for name in order:
            trained = run_cell(f"{name} {pair}", (*REWARD, *CELLS[name]), steps, RESULTS)
            seconds[name] += (of_run := [step["time/step_seconds"] for step in trained])
            measured[name] = statistics.fmean(of_run)
        yield {"pair": str(pair + 1), **_compared(measured)}
    yield {"pair": "all, medians of steps", **_compared({name: statistics.median(of) for name, of in seconds.items()})}


def _compared(seconds: dict[str, float]) -> Row:
    return {
        "step_seconds_without": round(seconds["none"], 4),
        "step_seconds_with": round(seconds["samples"], 4),
        "ratio": round(seconds["samples"] / seconds["none"], 3),
    }


def cpu() -> Iterator[Row]:
    """A row per shape: milliseconds per step that the caller waits and that the thread computes; bytes per token."""
    for samples, tokens in SHAPES:
        groups = tuple(_group(number, samples, tokens) for number in range(BATCH))
        table = tabulate(groups, np.linspace(-1, 1, BATCH * samples, dtype=np.float32))
        with tempfile.TemporaryDirectory() as directory:
            recorder = SampleRecorder(Path(directory) / "samples", groups=GROUPS, limit_bytes=1 << 34, decode=_decode)
            waited, computed = 0.0, [0.0]
            recorder.queue(partial(_note_time, computed))
            for step in range(1, STEPS + 1):
                began = time.perf_counter()
                recorder.batch(step, 9, groups, table)
                waited += time.perf_counter() - began
            recorder.queue(partial(_note_time, computed))
            recorder.finish()
            size = sum(file.path.stat().st_size for file in samples_files(Path(directory)))
        written = GROUPS * samples * (PROMPT + tokens)
        yield {
            "samples": GROUPS * samples,
            "tokens_per_sample": tokens,
            "caller_ms_per_step": round(1000 * waited / STEPS, 3),
            "thread_cpu_ms_per_step": round(1000 * (computed[-1] - computed[-2]) / STEPS, 1),
            "bytes_per_token": round(size / STEPS / written, 1),
        }


def _note_time(times: list[float]) -> None:
    times.append(time.thread_time())


def _group(number: int, samples: int, tokens: int) -> Group:
    random = np.random.default_rng(number)
    prompt = Prompt(prompt_id=f"train.jsonl:{number}", token_ids=(1,) * PROMPT, text="p" * PROMPT)
    made = []
    for _ in range(samples):
        mask = np.repeat(np.array([0, 1], np.uint8), (PROMPT, tokens))
        ids = np.minimum(random.zipf(1.3, PROMPT + tokens), VOCABULARY - 1).astype(np.int32)
        sample = Sample(
            tokens=ids,
            prompt_length=PROMPT,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -random.exponential(size=len(mask)), 0).astype(np.float32),
            weight_versions=np.where(mask, 7, NO_VERSION).astype(np.int32),
            text=_decode(ids[PROMPT:].tolist()),
            finish_reason="stop",
            reward=0.5,
        )
        made.append(sample)
    return group_of(Attempt(attempt_id=number, prompt=prompt, epoch=0), made)


def _decode(tokens: Sequence[int]) -> str:
    return "".join(f" w{token}" for token in tokens)
