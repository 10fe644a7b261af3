"""The ladder of ``make gpu-hour``: verdicts, and that it goes on; its runs have flags that fit 1, 2 and 8 GPUs."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import validate
from miles_async.types import JsonObject
from scripts import gpu_hour
from scripts.gpu_hour import Report, climb
from scripts.gpu_steps import LAYOUTS, STEPS, Bench, Figures, Skipped, Step, StepError
from tests.integration.real_run import SHORT_RUN, TRAIN_REVERSE


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("cpu", 0, tmp_path)


def step(key: str, take: object, *, limit: float = 60.0, needs_cuda: bool = False) -> Step:
    return Step(key=key, name=key, limit=limit, take=take, needs_cuda=needs_cuda)  # type: ignore[arg-type]


def waits(bench: Bench) -> Figures:
    """As a run that is waited for until the deadline."""
    bench.execute("waits", "timeit", "-n", "1", "import time; time.sleep(60)")
    return {}


def fails(_: Bench) -> Figures:
    raise StepError("expected 1, found\n2 | 3")


def skips(_: Bench) -> Figures:
    raise Skipped("expected 2 GPUs, found 1")


def test_every_step_gets_a_verdict_whatever_became_of_those_before(bench: Bench) -> None:
    steps = [
        step("fails", fails),
        step("hangs", waits, limit=0.5),
        step("cuda", fails, needs_cuda=True),
        step("skips", skips),
        step("ends badly", lambda bench: {"text": bench.execute("bad", "no_such_module")}),
        step("passes", lambda bench: {"GB/s": 12.3456789, "measured": [{"a": 1}]}),
    ]
    shown: list[str] = []
    started = time.monotonic()
    outcomes = list(climb(steps, bench, shown.append))
    assert time.monotonic() - started < 30
    assert [outcome.verdict for outcome in outcomes] == ["failed", "too slow", "skipped", "skipped", "failed", "passed"]
    assert [outcome.reason for outcome in outcomes[2:4]] == ["no CUDA device", "expected 2 GPUs, found 1"]
    assert "No module named no_such_module" in outcomes[4].reason
    report = Report(machine={"device": "CPU", "date": "2026-11-26", "commit": "abc"}, outcomes=outcomes)
    assert report.failed
    text = report.markdown()
    assert "| fails | failed | 0 | 60 | StepError: expected 1, found 2 / 3 |" in text
    assert "| passes | passed | 0 | 60 | GB/s 12.35 |" in text, "the JSON has what is no number"
    assert not Report(machine=report.machine, outcomes=outcomes[2:4]).failed


def test_an_interrupted_step_ends_its_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        waits(bench)
    assert started[0].returncode == -signal.SIGKILL


def test_the_gpu_is_named_without_cuda_in_this_process(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    on_gpus = dataclasses.replace(bench, device="cuda", gpus=2)
    assert gpu_hour.machine_facts(on_gpus)["device"] == "2 × NVIDIA H100"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_hour.machine_facts(on_gpus)["device"] == "2 × unknown GPU"


def test_a_report_is_written_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def count(_: Bench) -> Figures:
        path = tmp_path / "report.json"
        seen.append(len(json.loads(path.read_text())["outcomes"]) if path.exists() else 0)
        return {}

    monkeypatch.setattr(gpu_hour, "STEPS", (step("a", count), step("b", count), step("c", fails)))
    assert gpu_hour.main(["--output", str(tmp_path), "--only", "a", "b"]) == 0
    assert seen == [0, 1]
    assert gpu_hour.main(["--output", str(tmp_path / "all")]) == 1
    assert "torch" in json.loads((tmp_path / "report.json").read_text())["machine"]


PUBLISHED = {
    "step": 1,
    "publish/compared_tensors": 24,
    "publish/incomparable_tensors": 0,
    "publish/bytes": 2e9,
    "publish/sent_fraction": 1.0,
    "publish/send_seconds": 0.5,
    "publish/prepare_seconds": 0.7,
    "publish/pause_seconds": 0.6,
    "publish/copy_seconds": 0.1,
    "train/logprob_diff_mean": 1e-6,
    "train/logprob_diff_max": 1e-5,
    "train/grad_norm": 2.0,
}
FINISHED = {
    "balanced": True,
    "ending": "finished",
    "eval_reward_last": 0.95,
    "wall_seconds": 60.0,
    "trainer_idle_fraction": 0.5,
    "age_max": 2,
    "stage_seconds": {"start": 9.0},
}


class Played(Bench):
    """A machine whose runs end with what is given, by their names; else well."""

    rows: Mapping[str, Sequence[JsonObject]] = {}
    summary: Mapping[str, Any] = {}

    def train(self, name: str, *flags: str, layout: Sequence[str] | None = None) -> Any:
        rows = self.rows.get(name) or [PUBLISHED]
        return SimpleNamespace(steps=rows, summary=FINISHED | self.summary, run_dir=self.output)


def played(tmp_path: Path, device: str = "cpu", gpus: int = 0, **given: Any) -> Played:
    (tmp_path / "batch-1.parquet").touch()
    bench = Played(device, gpus, tmp_path)
    bench.rows, bench.summary = given.pop("rows", {}), given
    return bench


def taken(key: str, bench: Bench) -> tuple[str, str]:
    (step,) = (each for each in STEPS if each.key == key)
    (outcome,) = climb([step], bench, lambda _: None)
    return outcome.verdict, outcome.reason


RESUMED = {"resumed": [{"step": 4}, {"step": 5}]}
MORE = {**PUBLISHED, "train/logprob_diff_mean": 2e-4, "train/grad_norm": 2.01}
NOT_ALL = {**PUBLISHED, "publish/incomparable_tensors": 1}


@pytest.mark.parametrize("key", ["engine", "disk", "object", "quick", "resume", "layouts"])
def test_runs_that_are_as_expected_pass(key: str, tmp_path: Path) -> None:
    assert taken(key, played(tmp_path, rows=RESUMED)) == ("passed", "")


@pytest.mark.parametrize(
    ("key", "given", "problem"),
    [
        ("engine", {"rows": {"engine": [MORE]}}, "differ by less than 0.0001, found 0.0002"),
        ("engine", {"rows": {"engine": [NOT_ALL]}}, "found 24 that were and 1 that were not"),
        ("disk", {"rows": {"disk": [{**PUBLISHED, "publish/compared_tensors": 0}]}}, "found 0 that were"),
        ("object", {"rows": {"object_store": [{"step": 1}]}}, "expected a step with a publication after it"),
        ("quick", {"eval_reward_last": 0.9}, "expected an evaluation above 0.9"),
        ("quick", {"balanced": False}, "balanced accounts"),
        ("resume", {"rows": {"resumed": [{"step": 1}, {"step": 2}]}}, r"found \[1, 2\]"),
        ("layouts", {"rows": {"pp2": [MORE]}}, r"found another with \['PP 2'\]"),
        ("layouts", {"rows": {"ep2": [MORE]}}, r"found another with \['EP 2'\]"),
    ],
)
def test_runs_that_are_not_as_expected_fail(key: str, given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    verdict, reason = taken(key, played(tmp_path, **given))
    assert verdict == "failed"
    assert re.search(problem, reason), reason


def test_a_gpu_may_round_more(tmp_path: Path) -> None:
    rows = {name: [MORE] for name in ("engine", "pp2")}
    for key in ("engine", "layouts"):
        assert taken(key, played(tmp_path, "cuda", 2, rows=rows)) == ("passed", "")
    assert taken("layouts", played(tmp_path, "cuda", 1)) == ("skipped", "expected 2 GPUs, found 1")


def test_layouts_need_a_batch(tmp_path: Path) -> None:
    bench = played(tmp_path)
    (tmp_path / "batch-1.parquet").unlink()
    assert "which the step `engine` writes" in taken("layouts", bench)[1]


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_runs_fit_the_machine(gpus: int, tmp_path: Path) -> None:
    prepare_quickstart(["--task", "reverse"])  # makes what is absent
    layout = Bench("cuda" if gpus else "cpu", gpus, tmp_path).layout
    parsed = parse_arguments([*TRAIN_REVERSE[1:], *SHORT_RUN, *layout, "--run-dir", str(tmp_path / "run")])
    validate(parsed.arguments, parsed.checks)
    cluster = parsed.arguments.cluster
    if gpus > 1:
        assert cluster.trainer_world_size + cluster.rollout_num_gpus <= gpus
    if gpus == 1:
        assert (cluster.colocate, cluster.trainer_world_size, cluster.rollout_num_gpus) == (True, 1, 1)


def test_steps_have_distinct_names_and_layouts_split_two_ranks() -> None:
    assert len({each.key for each in STEPS}) == len(STEPS)
    for flags in LAYOUTS.values():
        parsed = parse_arguments([*TRAIN_REVERSE[1:], *SHORT_RUN, "--actor-num-gpus-per-node", "2", *flags])
        assert parsed.arguments.cluster.trainer_world_size == 2
