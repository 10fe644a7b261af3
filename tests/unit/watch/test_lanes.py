"""Lanes of trainer and engines: the ledger's and the metrics' times as letters and shares."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from miles_async.ledger.reader import AttemptRecord
from miles_async.observability.metrics_file import FILE_NAME
from miles_async.runtime.files.run_directory import ENGINES_FILE, RANKS_FILE
from miles_async.staleness.ledger import Outcome, Stage
from miles_async.types import EngineLoad, EngineReport, EnginesReport, JsonObject, RanksReport, RankTimes
from miles_async.watch.run import Run
from miles_async.watch.views.engines import engines
from miles_async.watch.views.lanes import COLUMNS, IDLE, lanes
from tests.unit.watch.timeline.trace_files import recorded_run

BEGAN = 1_000.0


def attempt(number: int, began: float, finished: float | None, *names: str, **others: object) -> AttemptRecord:
    known = dict.fromkeys(AttemptRecord.__struct_fields__) | {
        "attempt_id": number,
        "prompt_id": f"train.jsonl:{number}",
        "epoch": 0,
        "issued_version": 0,
        "history": (),
        "stage": Stage.IN_FLIGHT,
        "left_out": 0,
        "engines": names or None,
        "issued_at": BEGAN + began,
        "finished_at": None if finished is None else BEGAN + finished,
    }
    return AttemptRecord(**(known | others))


def by_name(found: JsonObject | None) -> dict[str, JsonObject]:
    assert found is not None
    return {lane["name"]: lane for lane in found["lanes"]}


def write_step(run_dir: Path, *, end: float, wait: float, train: float, copy: float, **phases: float) -> None:
    """A step with a publication of these phases; it ends with the copy of the weights."""
    seconds = {"time/wait": wait, "time/train": train, "time/step": wait + train + copy, "publish/copy": copy}
    seconds |= {f"publish/{phase}": value for phase, value in phases.items()}
    row = {"kind": "step", "step": 1, "time": BEGAN + end + sum(phases.values()), "weight_version/trainer": 0}
    row |= {f"{name}_seconds": value for name, value in seconds.items()}
    (run_dir / FILE_NAME).write_text(json.dumps(row) + "\n" + '{"kind": "st')  # the next line is not whole


def test_every_stretch_has_the_letter_of_what_took_most_of_it(tmp_path: Path) -> None:
    write_step(tmp_path, end=8, wait=5, train=2, copy=1, pausing=1, send=1)
    trained = {"step": 1, "outcome": Outcome.TRAINED, "ended_at": BEGAN + 7}
    records = [attempt(3, 8, 11, "b"), attempt(2, 2, 6, "a", "b", **trained), attempt(1, 1, 4, "a", **trained)]
    found = lanes(Run(tmp_path, "run"), ["a", "b", "c"], records, whole=True, rolling=False)
    assert found is not None
    assert (found["since"], found["until"]) == (BEGAN, BEGAN + 11)
    lane = by_name(found)
    assert [*lane] == ["trainer", "a", "b", "c"]
    second = COLUMNS / 11

    def letters(name: str) -> str:
        """In the middle of each second."""
        return "".join(lane[name]["columns"][int((number + 0.5) * second)] for number in range(11))

    assert letters("trainer") == "bbbbbttc..."
    assert letters("a") == ".ggggg..uu."
    assert letters("b") == "..gggg..uug"
    assert letters("c") == "........uu."
    assert lane["a"]["shares"] == pytest.approx({"g": 5 / 11, "u": 2 / 11, IDLE: 4 / 11}, abs=1e-3)
    assert lane["trainer"]["shares"]["t"] == pytest.approx(2 / 11, abs=1e-3)
    rolling = by_name(lanes(Run(tmp_path, "run"), ["a", "b", "c"], records, whole=True, rolling=True))
    assert set(rolling["c"]["columns"]) == {IDLE}

    pauses = {"a": ((BEGAN + 3, BEGAN + 4), (BEGAN + 8, BEGAN + 9)), "b": ((BEGAN + 9, None),)}
    engines = {name: EngineReport(state="serving", load=None, pauses=each) for name, each in pauses.items()}
    reported = EnginesReport(time=BEGAN + 10, engines=engines)
    known = lanes(Run(tmp_path, "run"), ["a", "b", "c"], records, whole=True, rolling=True, reported=reported)
    lane = by_name(known)
    assert letters("a") == ".ggugg..u.."
    assert letters("b") == "..gggg..gug"
    assert letters("c") == "..........."

    earlier = EnginesReport(
        time=BEGAN + 5, engines=engines | {"c": EngineReport(state="serving", load=None, pauses=())}
    )
    lane = by_name(lanes(Run(tmp_path, "run"), ["a", "b", "c"], records, whole=True, rolling=False, reported=earlier))
    assert letters("c") == "........uu."  # what came after the report


def test_evaluations_and_pauses_are_drawn_on_the_engines_that_have_them(tmp_path: Path) -> None:
    write_step(tmp_path, end=8, wait=5, train=2, copy=1, pausing=1, send=1)
    evaluation = {"kind": "evaluation", "step": 1, "time": BEGAN + 14, "eval/reward": 0.5}
    text = (tmp_path / FILE_NAME).read_text().splitlines()[0]
    (tmp_path / FILE_NAME).write_text(f"{text}\n{json.dumps(evaluation)}\n")
    trained = {"step": 1, "outcome": Outcome.TRAINED, "ended_at": BEGAN + 7}
    records = [attempt(2, 8, 14, "a"), attempt(1, 1, 4, "a", **trained)]
    roles = {"a": "train", "b": "evaluation", "c": "frozen"}

    def shown(engines: dict[str, EngineReport]) -> dict[str, set[str]]:
        report = EnginesReport(time=BEGAN + 2, engines=engines)
        found = lanes(Run(tmp_path, "run"), [*roles], records, whole=True, rolling=False, reported=report)
        lane = by_name(found)
        return {name: set(lane[name]["columns"]) - {IDLE} for name in roles}

    def engines(**chosen: str) -> dict[str, EngineReport]:
        return {name: EngineReport(state="serving", load=None, pauses=(), role=role) for name, role in chosen.items()}

    assert shown(engines(**roles)) == {"a": {"g", "u"}, "b": {"e"}, "c": set()}
    assert shown(engines(a="train", b="train", c="frozen")) == {"a": {"g", "u"}, "b": {"u", "e"}, "c": set()}


def test_time_that_several_attempts_of_an_engine_cover_counts_once(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    begins = np.sort(draw.uniform(0, 300, 400))[::-1]  # within a column, too: one is a second
    lasts = draw.exponential(0.3, 400)
    records = [attempt(n, b, b + s, "a") for n, (b, s) in enumerate(zip(begins.tolist(), lasts.tolist(), strict=True))]
    lane = by_name(lanes(Run(tmp_path, "run"), ["a"], records, whole=True, rolling=False))["a"]
    moments = np.linspace(begins.min(), (begins + lasts).max(), 100_001)
    busy = ((moments[:, None] >= begins) & (moments[:, None] < begins + lasts)).any(1)
    assert lane["shares"]["g"] == pytest.approx(busy.mean(), abs=1e-3)


def test_each_rank_has_its_own_parts_and_the_trainers_waits(tmp_path: Path) -> None:
    write_step(tmp_path, end=8, wait=4, train=3, copy=1)
    slow = {"packing": 0.5, "forward and backward": 2.0, "reducing gradients": 0.25, "another": 0.25}
    quick = {"packing": 0.5, "forward and backward": 1.0, "reducing gradients": 1.5}
    report = RanksReport(steps=((RankTimes(BEGAN + 4, slow), RankTimes(BEGAN + 4, quick)),))
    found = lanes(Run(tmp_path, "run"), [], [], whole=True, rolling=False, ranks=report)
    lane = by_name(found)
    assert [*lane] == ["trainer", "rank 0", "rank 1"]
    assert found is not None
    half = COLUMNS / 16

    def letters(name: str) -> str:
        return "".join(lane[name]["columns"][int((number + 0.5) * half)] for number in range(16))

    assert letters("trainer") == "b" * 8 + "t" * 6 + "c" * 2
    assert letters("rank 0") == "b" * 8 + "kffff" + letters("rank 0")[13] + "c" * 2
    assert letters("rank 1") == "b" * 8 + "kffrrr" + "c" * 2
    assert lane["rank 0"]["shares"] == pytest.approx(
        {"b": 1 / 2, "k": 1 / 16, "f": 1 / 4, "r": 1 / 32, "t": 1 / 32, "c": 1 / 8, IDLE: 0}, abs=1 / COLUMNS
    )


def test_a_real_run_has_the_seconds_of_its_ledger(tmp_path: Path) -> None:
    run = Run(recorded_run(tmp_path / "run"), "run")
    found = engines(run)["lanes"]
    with run.ledger() as reader:
        assert reader is not None
        records = reader.page(limit=1_000)
    since, until = found["since"], found["until"]
    moments = np.linspace(since, until, 100_001)[:-1]
    for name, lane in by_name(found).items():
        if name == "trainer":
            rows = [json.loads(line) for line in (run.directory / FILE_NAME).read_text().splitlines()]
            trained = sum(row.get("time/train_seconds", 0.0) for row in rows)
            assert lane["shares"]["t"] == pytest.approx(trained / (until - since), abs=2e-3)
            continue
        busy = np.zeros(len(moments), dtype=bool)
        for record in records:
            if name in (record.engines or ()):
                busy |= (moments >= record.issued_at) & (moments < (record.finished_at or record.ended_at or until))
        assert lane["shares"]["g"] <= busy.mean() + 1e-3  # less what publications cover
        assert lane["shares"]["g"] + lane["shares"]["u"] >= busy.mean() - 1e-3


def test_nothing_is_drawn_before_anything_happened(tmp_path: Path) -> None:
    assert lanes(Run(tmp_path, "run"), [], [], whole=True, rolling=False) is None


def test_a_thousand_engines_are_quick_and_small(tmp_path: Path) -> None:
    names = [f"engine-{number}" for number in range(1_000)]
    records = [attempt(n, n / 100, n / 100 + 5, names[n % 1_000], names[n // 2]) for n in reversed(range(2_000))]
    began = time.process_time()
    found = lanes(Run(tmp_path, "run"), names, records, whole=False, rolling=False)
    assert time.process_time() - began < 2  # a fifth of a second when it was written
    assert len(by_name(found)) == 1_000
    assert len(json.dumps(found)) < 500_000


def test_a_thousand_ranks_and_pauses_are_quick_and_small(tmp_path: Path) -> None:
    write_step(tmp_path, end=400, wait=5, train=2, copy=1, pausing=1, send=1)
    names, parts = [f"engine-{number}" for number in range(1_000)], [*"abcd", "forward and backward"]
    records = [attempt(n, n / 10, n / 10 + 5, names[n % 1_000]) for n in reversed(range(2_000))]
    pauses = tuple((BEGAN + 10 * n, BEGAN + 10 * n + 1) for n in range(24))
    engine = EngineReport(state="serving", load=EngineLoad(running=1, waiting=1, kv_use=0.5), pauses=pauses)
    reported = EnginesReport(time=BEGAN + 390, engines=dict.fromkeys(names, engine))
    steps = [RankTimes(BEGAN + 10 * step, dict.fromkeys(parts, 1.25)) for step in range(20)]
    ranks = RanksReport(steps=tuple((step,) * 1_000 for step in steps))
    (tmp_path / ENGINES_FILE).write_bytes(msgspec.json.encode(reported))
    (tmp_path / RANKS_FILE).write_bytes(msgspec.json.encode(ranks))
    run, began = Run(tmp_path, "run"), time.process_time()
    known = {"reported": run.engines(), "ranks": run.ranks()}
    found = lanes(run, names, records, whole=False, rolling=False, **known)
    assert time.process_time() - began < 4  # 0.15 s when it was written
    assert len(by_name(found)) == 2_001
    assert len(json.dumps(found)) < 1_000_000


@pytest.mark.parametrize("content", [b"", b"{", b'{"steps": 1}', b'{"time": 1, "engines": {"a": {}}}', b"\xff"])
def test_reports_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path) -> None:
    for name in (ENGINES_FILE, RANKS_FILE):
        (tmp_path / name).write_bytes(content)
    run = Run(tmp_path, "run")
    assert (run.engines(), run.ranks()) == (None, None)
