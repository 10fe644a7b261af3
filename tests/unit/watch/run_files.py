"""A finished run's directory for tests of the page: 40 steps, a ledger with several ends, logs of all kinds."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from miles_async.arguments import Arguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.ledger.store import LedgerStore
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.runtime.files.run_directory import ENGINES_FILE, RANKS_FILE
from miles_async.samples.columns import FileNote, SampleRow
from miles_async.samples.files import file_of
from miles_async.staleness.events import Changed, Ended, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.types import Changes, EngineLoad, EngineReport, EnginesReport, RanksReport, RankTimes
from tests.property.builders import make_attempt
from tests.unit.commands.run_directories import write_run
from tests.unit.samples.sample_rows import row, write_file, write_samples

STEPS = 40
REASON = "all rewards are equal"


def rewards(step: int) -> float:
    return 0.1 + 0.8 * step / STEPS


def write_finished_run(directory: Path, *, steps: int = STEPS, ending: str | None = "finished") -> Path:
    """``ending``: of summary.json; None: there is none, as after a kill."""
    arguments = Arguments(rollout=RolloutArguments(num_rollout=steps))
    run_dir = write_run(directory, rewards=(), arguments=arguments, alive=False)
    _metrics(run_dir, steps)
    _ledger(run_dir)
    _logs(run_dir)
    _samples(run_dir)
    _reports(run_dir)
    if ending is not None:
        summary = {"ending": ending, "rollout_idle_fraction": 0.25, "groups": {"issued": 4}}
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def _metrics(run_dir: Path, steps: int) -> None:
    file = MetricsFile(run_dir / FILE_NAME, clock=lambda: 1_000.0)
    file.log({"eval/reward": 0.25, "eval/test/reward/mean": 0.25}, step=0)
    for step in range(1, steps + 1):
        times = {"time/step_seconds": 2.0, "time/wait_seconds": 0.5, "train/tokens": 4_000.0}
        ages = {"age/mean": 0.75, "age/max": 1.0, "age/count/0": 32.0, "age/count/1": 96.0}
        publication = {"publish/copy_seconds": 0.1, "publish/probe_seconds": 0.05, "publish/send_seconds": 0.3}
        publication["publish/pause_seconds"] = 0.4
        file.log({"reward/mean": rewards(step), **times, **ages, **publication, "my/own": float(step)}, step=step)
    file.log({"eval/reward": 0.75}, step=steps)
    file.finish()


def _ledger(run_dir: Path) -> None:
    store = LedgerStore(run_dir / "ledger.sqlite")
    store.write([(1.0, Issued(attempt=make_attempt(number))) for number in (1, 2, 3, 4)])
    store.write([(2.0, Ended(attempt_id=n, outcome=Outcome.FILTERED, reason=REASON)) for n in (1, 2)])
    changed = Changes(after=20, before={"lr": 5e-4}, values={"lr": 4e-4})
    store.write([(2.25, Changed(changed))])
    store.write([(2.5, Ended(attempt_id=3, outcome=Outcome.QUARANTINED, reason="<b>reward</b> raised"))])
    store.close()


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \u202eevil\u202c \x00\x1b[31m </script>"


def _samples(run_dir: Path) -> None:
    """Two groups of four samples in each of three steps, and an evaluation; one answer is hostile."""
    for step in (10, 20, 30):
        rows = [sample_of(step, attempt, number) for attempt in (1, 2) for number in range(4)]
        note = FileNote(kind="train", step=step, groups=3, groups_written=2, why_fewer="the share of --save-samples")
        write_file(file_of(run_dir / "samples", "train", step), note, rows)
    untrained = {"target_version": None, "age": None}
    evaluated = row(kind="eval", step=20, data_set="test", attempt_id=-1, prompt_id="test.jsonl:1", **untrained)
    write_samples(run_dir, "eval", 20, [evaluated])


def sample_of(step: int, attempt: int, number: int) -> SampleRow:
    """Reward 0, 0.25, 0.5, 0.75 by its position; the last sample of attempt 2 is hostile."""
    hostile = attempt == 2 and number == 3
    messages = [{"role": "user", "content": "rev 12"}, {"role": "assistant", "content": HOSTILE if hostile else "21"}]
    return row(
        step=step,
        attempt_id=attempt,
        sample=number,
        samples=4,
        reward=number / 4,
        response=HOSTILE if hostile else f"answer {number} of {step}",
        prompt=f"<|user|>rev {attempt}",
        token_texts=["rev", " 12", HOSTILE if hostile else "2", "1\n", "</s>"],
        trainer_logprobs=[0.0, 0.0, -0.75, -0.25, 0.0],
        entropies=[0.0, 0.0, 1.5, 0.5, 0.0],
        messages=json.dumps(messages) if number % 2 else None,
    )


def _reports(run_dir: Path) -> None:
    load = EngineLoad(running=7, waiting=2, kv_use=0.375)
    engine = EngineReport(state="serving", load=load, pauses=((1_076.0, 1_076.5),))
    (run_dir / ENGINES_FILE).write_bytes(msgspec.json.encode(EnginesReport(time=1_100.0, engines={"engine-0": engine})))
    parts = {"packing": 0.125, "forward and backward": 1.0, "reducing gradients": 0.25}
    step = (RankTimes(1_075.75, parts), RankTimes(1_075.75, parts | {"forward and backward": 0.5}))
    (run_dir / RANKS_FILE).write_bytes(msgspec.json.encode(RanksReport(steps=(step,))))


def _logs(run_dir: Path) -> None:
    logs = run_dir / "logs"
    entries = [
        {"level": "info", "timestamp": "2026-11-25T14:00:00Z", "event": "engine is up", "engine": "engine-0"},
        {
            "level": "warning",
            "timestamp": "2026-11-25T14:00:02Z",
            "event": "restarting engine",
            "engine": "engine-0",
            "logger": "miles_async.engines.supervisor",
            "hint": "raise --engine-timeout",
        },
    ]
    (logs / "rollout.log").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (logs / "driver.log").write_text('{"level": "info", "event": "training begins"}\n{"lev')
    (logs / "engine-0.0.log").write_bytes(b"plain line\n\xff\xfe not UTF-8\n\x1b[2Jred \x1b[1;32mgreen\x1b[0m\n")
    (logs / "engine-0.1.log").write_text("second start\n")
    (logs / "trainer-0.log").write_text("rank 0\n")
