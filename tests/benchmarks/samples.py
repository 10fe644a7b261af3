"""What samples on disk (``--save-samples``) and trackers cost: the quick start with and without them, in pairs, and the
recorder's thread alone.

A machine that is busy with other things spoils the seconds of a step, and hardly the CPU seconds of the two processes
that do the work: the driver has the trackers' threads, the rollout manager the recorder's.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.runtime.network.keys import METRICS_KEY_VARIABLE
from miles_async.samples.reader import samples_files
from miles_async.samples.recorder import SampleRecorder
from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import BranchTable, tabulate
from miles_async.types import NO_VERSION, Attempt, Group, Prompt, Sample, TokenScores
from tests.benchmarks.quickstart_overlap import WARM_UP_STEPS, run_cell
from tests.benchmarks.report import RESULTS, Row

REWARD = ("--rm-type", "exact_match", "--custom-rm-path", "none")  # not a slow one
CELLS = {
    "watched": ("--save-samples", "2", "--use-tensorboard", "--use-prometheus", "--prometheus-port", "19464"),
    "none": ("--save-samples", "0"),
}
SHAPES = ((8, 20), (8, 4096), (16, 16384))  # samples of a group, tokens of a response
GROUPS, BATCH, STEPS = 2, 32, 10
PROMPT = 64  # tokens
VOCABULARY = 50_000
_POLL_SECONDS = 0.05


def rows(pairs: int = 4, steps: int = 40) -> Iterator[Row]:
    """A row per pair, of which every other one begins without; the last row has the medians."""
    prepare_quickstart(["--task", "reverse"])
    os.environ.setdefault(METRICS_KEY_VARIABLE, "bench")
    seconds: dict[str, list[float]] = {name: [] for name in CELLS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in CELLS}
    for pair in range(pairs):
        order = list(CELLS) if pair % 2 else list(CELLS)[::-1]
        measured, computed = {}, {}
        for name in order:
            with _CpuOfRun(RESULTS / f"{name}-{pair}") as watched:
                trained = run_cell(f"{name} {pair}", (*REWARD, *CELLS[name]), steps, RESULTS)
            seconds[name] += (of_run := [step["time/step_seconds"] for step in trained])
            cpu_seconds[name].append(watched.per_step())
            measured[name], computed[name] = statistics.fmean(of_run), cpu_seconds[name][-1]
        yield {"pair": str(pair + 1), **_compared(measured, computed)}
    medians = [{name: statistics.median(found[name]) for name in CELLS} for found in (seconds, cpu_seconds)]
    yield {"pair": "all, medians", **_compared(*medians)}


def _compared(seconds: dict[str, float], cpu_seconds: dict[str, float]) -> Row:
    return {
        "step_seconds_without": round(seconds["none"], 4),
        "step_seconds_with": round(seconds["watched"], 4),
        "ratio": round(seconds["watched"] / seconds["none"], 3),
        "cpu_ms_without": round(1000 * cpu_seconds["none"], 1),
        "cpu_ms_with": round(1000 * cpu_seconds["watched"], 1),
        "cpu_percent_of_step": round(100 * (cpu_seconds["watched"] - cpu_seconds["none"]) / seconds["none"], 1),
    }


class _CpuOfRun:
    """CPU seconds of the driver and the rollout manager of the run in this block, by steps trained."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._seen: dict[int, float] = {}  # lines of metrics.jsonl → CPU seconds when they were first seen
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _CpuOfRun:
        self._metrics.unlink(missing_ok=True)  # of an earlier benchmark
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def per_step(self) -> float:
        """CPU seconds per step after the warm-up."""
        (first, before), *_, (last, after) = sorted(
            (lines, cpu) for lines, cpu in self._seen.items() if lines >= WARM_UP_STEPS
        )
        return (after - before) / (last - first)

    def _watch(self) -> None:
        processes: list[psutil.Process] = []
        while not self._done.wait(_POLL_SECONDS):
            lines = len(self._metrics.read_text().splitlines()) if self._metrics.exists() else 0
            if lines and len(processes) < 2:
                processes = [each for each in psutil.Process().children(recursive=True) if _measured(each)]
            if lines not in self._seen:
                with suppress(psutil.NoSuchProcess):
                    self._seen[lines] = sum(sum(each.cpu_times()[:2]) for each in processes)


def _measured(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        return "train" in words or words[:1] == ["ray::RolloutActor"]
    return False


def cpu() -> Iterator[Row]:
    """A row per shape: milliseconds per step that the caller waits and that the thread computes; bytes per token."""
    for samples, tokens in SHAPES:
        groups = tuple(_group(number, samples, tokens) for number in range(BATCH))
        table = tabulate(groups, np.linspace(-1, 1, BATCH * samples, dtype=np.float32))
        scores = _scores(table)
        with tempfile.TemporaryDirectory() as directory:
            recorder = SampleRecorder(Path(directory) / "samples", groups=GROUPS, limit_bytes=1 << 34, decode=_decode)
            waited, computed, written_all = 0.0, list[float](), threading.Event()
            recorder.batch(0, 9, groups, table)
            recorder.trained(0)  # which imports pyarrow
            recorder.queue(partial(_note_time, computed))
            for step in range(1, STEPS + 1):
                began = time.perf_counter()
                recorder.batch(step, 9, groups, table)
                recorder.trained(step, scores)
                waited += time.perf_counter() - began
            recorder.queue(partial(_note_time, computed))
            recorder.queue(written_all.set)
            written_all.wait()
            recorder.finish()
            size = sum(file.path.stat().st_size for file in samples_files(Path(directory)))
        written = GROUPS * samples * (PROMPT + tokens)
        yield {
            "samples": GROUPS * samples,
            "tokens_per_sample": tokens,
            "caller_ms_per_step": round(1000 * waited / STEPS, 3),
            "thread_cpu_ms_per_step": round(1000 * (computed[1] - computed[0]) / STEPS, 1),
            "bytes_per_token": round(size / (STEPS + 1) / written, 1),
        }


def _note_time(times: list[float]) -> None:
    times.append(time.thread_time())


def _scores(table: BranchTable) -> list[TokenScores]:
    """Of all branches, with log-probs that don't repeat; no entropies, as by default."""
    draw = np.random.default_rng(0)
    return [
        TokenScores(branch=branch, logprobs=-draw.exponential(1, length).astype(np.float32), entropies=None)
        for branch, length in enumerate(table.lengths.tolist())
    ]


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
