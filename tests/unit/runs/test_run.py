"""A run from Python: how it starts, what is read of it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import miles_async
from miles_async.errors import ConfigurationError, MilesAsyncError
from miles_async.observability.metrics_file import MetricsFile
from miles_async.runs import starting
from miles_async.runs.carried import Carried
from miles_async.runs.config import Config
from miles_async.runs.records import Metrics, Records
from miles_async.runs.run import Run
from miles_async.runtime.files.run_directory import CODE_DIRECTORY
from miles_async.runtime.network.control import ControlServer
from miles_async.runtime.processes.run_process import MARK, RUN_FILE, note_run_process
from miles_async.samples.columns import FileNote
from miles_async.samples.files import DIRECTORY, file_of
from tests.unit.samples.sample_rows import row, write_file

# Claims the directory as a run does, writes metrics and a summary; its last word says how it goes.
DRIVER = """
import json, os, sys, time
from pathlib import Path
from miles_async.observability.metrics_file import MetricsFile
from miles_async.runtime.files.run_directory import claimed
from miles_async.runtime.processes.run_process import mark_processes

run_dir, manner = Path(sys.argv[1]), sys.argv[2]
print("checking", flush=True)
if manner == "refused":
    print("error: --lr: expected error: less")
    raise SystemExit(2)
if manner == "broken":
    raise SystemExit("it broke")
if manner == "slow":
    time.sleep(60)
mark_processes()
with claimed(run_dir, Path("absent")):
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    try:
        for step in range(1, 4):
            metrics.log({"reward/mean": step / 10}, step=step)
            time.sleep(0.2)
        if manner == "endless":
            time.sleep(60)
    except KeyboardInterrupt:
        manner = "interrupted"
    endings = {"failed": {"ending": "failed", "error": "an engine is lost"}}
    summary = SUMMARY | {"steps": 3} | endings.get(manner, {"ending": "finished"})
    if manner != "killed":
        (run_dir / "summary.json").write_text(json.dumps(summary))
"""
SUMMARY: dict[str, object] = {
    "steps": 0, "wall_seconds": 1.0, "reward_first": None, "reward_last": None, "eval_reward_first": None,
    "eval_reward_last": None, "age_max": None, "age_histogram": {}, "groups": {}, "balanced": True,
    "trainer_idle_fraction": None, "rollout_idle_fraction": None,
    "publish": {"count": 0, "pause_seconds_mean": None, "prepare_seconds_mean": None},
    "logprob_diff": {"mean": None, "max": None}, "weight_version": None, "stage_seconds": {},
}  # fmt: skip

Started = Callable[..., Run]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.from_args(run_dir=tmp_path / "runs" / "one")


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, config: Config) -> Iterator[Started]:
    runs: list[Run] = []

    def begin(manner: str, reward: object = None, config: Config = config) -> Run:
        source = "import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n" + DRIVER
        source = source.replace("SUMMARY", repr(SUMMARY))
        run_dir = str(config.arguments.observability.run_dir)
        monkeypatch.setattr(starting, "train_command", lambda words: [sys.executable, "-c", source, run_dir, manner])
        runs.append(miles_async.start(config, reward=reward))
        return runs[-1]

    yield begin
    for run in runs:
        run.stop(5)


def test_metrics_come_as_they_are_written_and_end_with_the_run(begin: Started) -> None:
    run = begin("finished")
    seen = [(row["step"], row["reward/mean"], run.state) for row in run.metrics()]
    assert [(step, reward) for step, reward, _ in seen] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert seen[0][2] == "running"
    assert run.wait(10)["steps"] == 3
    assert (run.directory / "console.log").read_text() == "checking\n"
    assert [path.name for path in run.directory.parent.iterdir()] == [run.directory.name]
    assert run.metrics().to_pandas()["reward/mean"].to_dict() == {1: 0.1, 2: 0.2, 3: 0.3}
    assert "over" in repr(run)


async def test_metrics_are_an_asynchronous_iterator_too(begin: Started) -> None:
    run = await asyncio.to_thread(begin, "finished")
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    other = asyncio.create_task(other_work())
    assert [row["step"] async for row in run.metrics()] == [1, 2, 3]
    other.cancel()
    assert turns > 10


async def test_the_event_loop_runs_while_the_end_is_looked_for(tmp_path: Path) -> None:
    looking, seen = threading.Event(), threading.Event()
    answers = list[bool]()

    def slow() -> bool:
        looking.set()
        answers.append(seen.wait(10))
        return True

    async def other_work() -> None:
        await asyncio.to_thread(looking.wait, 10)
        seen.set()

    other = asyncio.create_task(other_work())
    assert [row async for row in Metrics(tmp_path, slow, follow=True)] == []
    await other
    assert answers == [True]


def test_a_file_that_was_cut_is_read_again_and_its_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    over = threading.Event()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "long": "long"}\n\xff\xfe\n3\n{"step": 2}\n')
    metrics = iter(Metrics(tmp_path, over.is_set, follow=True))
    assert [next(metrics)["step"] for _ in range(2)] == [1, 2]
    path.write_bytes(b'{"step": 3}\n')
    assert next(metrics)["step"] == 3
    over.set()
    assert list(metrics) == []


def test_without_following_a_loop_ends_with_what_is_there(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log({"reward/mean": 0.5}, step=1)
    file.finish()
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"kind": "st')
    metrics = Run(tmp_path).metrics(follow=False)
    assert [row["step"] for row in metrics] == [1]
    assert [row["step"] for row in metrics] == [1]  # each loop begins at the first


def test_metrics_of_a_restarted_run_go_on_in_its_new_directory(tmp_path: Path) -> None:
    over = threading.Event()
    run = Run(tmp_path / "run")
    metrics = iter(Metrics(run.directory, over.is_set, follow=True))
    for name, step in (("first", 1), ("second", 2)):
        file = MetricsFile(tmp_path / name / "metrics.jsonl")
        file.log({"reward/mean": 0.5}, step=step)
        file.finish()
    (tmp_path / "first").rename(run.directory)
    assert next(metrics)["step"] == 1
    run.directory.rename(tmp_path / "aside")
    (tmp_path / "second").rename(run.directory)
    assert next(metrics)["step"] == 2
    over.set()
    assert list(metrics) == []


def test_what_the_command_line_would_print_is_raised_and_nothing_is_left(begin: Started, config: Config) -> None:
    run_dir = config.arguments.observability.run_dir
    with pytest.raises(ConfigurationError, match=r"^--lr: expected error: less$"):
        begin("refused")
    with pytest.raises(MilesAsyncError, match=r"(?s)with status 1:\nchecking\nit broke"):
        begin("broken")
    assert not any(run_dir.parent.iterdir())


def test_relative_paths_begin_where_the_flags_were_read(
    begin: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.from_args(run_dir="runs/one")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = begin("finished", config=config.having(lr=1e-5))
    assert run.wait(10)["steps"] == 3
    assert run.directory == tmp_path / "runs" / "one"
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_refused_run_leaves_an_earlier_one_as_it_was(begin: Started) -> None:
    earlier = begin("finished")
    earlier.wait(10)
    before = sorted(path.name for path in earlier.directory.iterdir())
    with pytest.raises(ConfigurationError):
        begin("refused", reward=lambda: None)
    assert sorted(path.name for path in earlier.directory.iterdir()) == before
    assert [path.name for path in earlier.directory.parent.iterdir()] == [earlier.directory.name]


def test_code_that_cannot_be_written_leaves_an_earlier_run_as_it_was(
    begin: Started, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(carried: Carried, run_dir: Path) -> None:
        (run_dir / CODE_DIRECTORY).mkdir(parents=True)
        raise OSError("No space left on device")

    monkeypatch.setattr(Carried, "write", write)
    run_dir = config.arguments.observability.run_dir
    with pytest.raises(ConfigurationError, match=f"--run-dir {run_dir}: No space left"):
        begin("finished", reward=lambda: None)
    assert not run_dir.exists()
    earlier = begin("finished")
    earlier.wait(10)
    before = sorted(path.name for path in run_dir.iterdir())
    with pytest.raises(ConfigurationError, match="No space left"):
        begin("finished", reward=lambda: None)
    assert sorted(path.name for path in run_dir.iterdir()) == before
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


def test_carried_code_is_in_the_run_directory_and_an_earlier_run_beside_it(begin: Started) -> None:
    begin("finished").wait(10)
    run = begin("finished", reward=lambda: None)
    run.wait(10)
    assert sorted(path.name for path in (run.directory / CODE_DIRECTORY).iterdir()) == [
        "miles_async_carried.pickle",
        "miles_async_carried.py",
    ]
    assert len(list(run.directory.parent.iterdir())) == 2


def test_an_interrupted_start_leaves_no_process(begin: Started, config: Config) -> None:
    started: list[subprocess.Popen[bytes]] = []
    make = subprocess.Popen

    def note(*arguments: object, **named: object) -> subprocess.Popen[bytes]:
        started.append(make(*arguments, **named))
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", note)
        with pytest.raises(KeyboardInterrupt):
            begin("slow")
    assert started[0].poll() is not None


def test_stop_ends_a_run_in_order(begin: Started) -> None:
    run = begin("endless")
    with run:
        assert next(iter(run.metrics()))["step"] == 1
        assert run.summary is None
        with pytest.raises(TimeoutError, match=r"running> after 0\.1 s"):
            run.wait(0.1)
    assert run.state == "over"
    assert run.summary is not None


def test_between_two_lives_stop_ends_the_process_that_would_start_another(tmp_path: Path) -> None:
    keeper = subprocess.Popen(["sleep", "60"])
    with Run(tmp_path, keeper) as run:  # its directory has been moved aside
        assert run.stop(5) is None
        assert keeper.poll() == -signal.SIGTERM
    attached = Run(tmp_path)
    assert attached.state == "over"
    with pytest.raises(ConfigurationError, match="expected a run directory"):
        attached.stop(1)


@pytest.mark.parametrize(
    ("manner", "expected"), [("failed", "the run failed: an engine is lost"), ("killed", "the run was killed")]
)
def test_waiting_for_a_run_that_did_not_finish_raises_why(begin: Started, manner: str, expected: str) -> None:
    with pytest.raises(MilesAsyncError, match=expected):
        begin(manner).wait(10)


def test_a_run_outlives_its_starter_and_can_be_attached_to(begin: Started) -> None:
    run = begin("endless")
    assert os.getsid(json.loads((run.directory / RUN_FILE).read_text())["pid"]) != os.getsid(0)
    attached = miles_async.attach(run.directory)
    assert attached.state == "running"
    assert attached.status.pid == json.loads((run.directory / RUN_FILE).read_text())["pid"]
    deadline = time.monotonic() + 10
    while len(list(attached.metrics(follow=False))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    attached.stop()
    assert attached.state == "over"
    assert attached.wait(1)["steps"] == 3


async def test_settings_of_a_live_run_are_changed_through_its_control_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "mark")
    note_run_process(tmp_path, tmp_path / "control")

    async def change(changes: dict[str, str]) -> str:
        if "seed" in changes:
            raise ConfigurationError("seed cannot change")
        return f"{changes}"

    async def settings() -> str:
        return "lr 1e-06"

    run = miles_async.attach(tmp_path)
    async with ControlServer(tmp_path / "control", {"set": change, "settings": settings}):
        changed = await asyncio.to_thread(run.set, lr=1e-05, max_weight_staleness=None, checkpoint="now")
        assert changed == "{'lr': '1e-05', 'max_weight_staleness': 'none', 'checkpoint': 'now'}"
        assert await asyncio.to_thread(run.set) == "lr 1e-06"
        with pytest.raises(ConfigurationError, match="seed cannot change"):
            await asyncio.to_thread(run.set, seed=1)


def test_attaching_to_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a run directory"):
        miles_async.attach(tmp_path)
    with pytest.raises(ConfigurationError, match="there is no directory"):
        miles_async.attach(tmp_path / "absent")


def test_samples_are_records_that_conditions_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "mark")
    note_run_process(tmp_path, tmp_path / "control")
    (folder := tmp_path / DIRECTORY).mkdir()
    for step in (10, 20):
        rows = [row(step=step, sample=number, reward=float(number)) for number in range(2)]
        note = FileNote(kind="train", step=step, groups=1, groups_written=1)
        write_file(file_of(folder, "train", step), note, rows)
    run = miles_async.attach(tmp_path)
    assert run.samples().to_pandas()[["step", "reward"]].values.tolist() == [[10, 0], [10, 1], [20, 0], [20, 1]]
    (found,) = run.samples(steps=[20], reward=(0.5, 1))
    assert (found["step"], found["reward"], found["response"]) == (20, 1.0, "21")
    assert "tokens" not in found
    (whole,) = run.samples(steps=[20], reward=(0.5, 1), tokens=True)
    assert whole["tokens"] == row().tokens


def test_without_pandas_a_table_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigurationError, match="needs pandas: pip install pandas"):
        Records().to_pandas()
