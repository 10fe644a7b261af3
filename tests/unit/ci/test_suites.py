"""The gates of end-to-end suites, on runs that were recorded: two that learned, one that did not, and broken ones."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import validate
from miles_async.types import JsonObject

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).parent / "recorded"
FINISHED = {"ending": "finished", "balanced": True}
SUITE = "quickstart-cpu"

Row = dict[str, Any]
Rows = list[Row]


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    """scripts/suite.py"""
    sys.path.insert(0, str(ROOT / "scripts"))
    import suite as module

    sys.path.pop(0)
    return module


def recorded(name: str) -> Rows:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def failed(suite: ModuleType, rows: Rows, summary: JsonObject = FINISHED) -> list[str]:
    gates = suite.read_suites()[SUITE].gates
    return [verdict.what for verdict in suite.judge(gates, rows, summary) if not verdict.passed]


@pytest.mark.parametrize("name", ["good_one", "good_two"])
def test_runs_that_learned_pass(suite: ModuleType, name: str) -> None:
    assert failed(suite, recorded(name)) == []


def test_a_run_that_did_not_learn_fails_where_it_should_have(suite: ModuleType) -> None:
    """Recorded with a learning rate of 1e-9 and without evaluation."""
    assert failed(suite, recorded("bad_no_learning")) == [
        "reward/mean, mean of steps 16-20",
        "reward/mean, mean of steps 36-40",
        "eval/reward, step 40",
    ]


def changed(rows: Rows, change: Callable[[Row], None], step: int) -> Rows:
    rows = [dict(row) for row in rows]
    change(next(row for row in rows if row["step"] == step and "reward/mean" in row))
    return rows


@pytest.mark.parametrize(
    ("metric", "value", "gate"),
    [
        ("age/max", 3, "age/max, max of steps 1-40"),
        ("train/logprob_diff_max", 2e-4, "train/logprob_diff_max, max of steps 1-40"),
        ("train/logprob_diff_max", math.nan, "train/logprob_diff_max, max of steps 1-40"),
        ("train/logprob_diff_max", None, "train/logprob_diff_max, max of steps 1-40"),
    ],
)
def test_one_step_out_of_its_band_is_enough(suite: ModuleType, metric: str, value: float | None, gate: str) -> None:
    rows = changed(recorded("good_one"), lambda row: row.update({metric: value}), step=17)
    assert failed(suite, rows) == [gate]


def test_a_run_that_is_too_good_leaves_its_band_too(suite: ModuleType) -> None:
    """A reward of 0.9 before anything was learned is a broken reward."""
    rows = recorded("good_one")
    for row in rows[:7]:
        if "reward/mean" in row:
            row["reward/mean"] = 0.9
    assert "reward/mean, mean of steps 1-5" in failed(suite, rows)


def test_a_run_that_ended_early_or_badly_fails(suite: ModuleType) -> None:
    rows = [row for row in recorded("good_one") if row["step"] < 30]
    assert "reward/mean, mean of steps 36-40" in failed(suite, rows)
    assert failed(suite, recorded("good_one"), {"ending": "stalled", "balanced": False}) == ["ending", "balanced"]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("good_one", 0, "### quickstart-cpu: passed"), ("bad_no_learning", 1, "| FAILED |")],
)
def test_the_command_reports_and_exits(
    suite: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: int,
    words: str,
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    (tmp_path / "metrics.jsonl").write_text((RECORDED / f"{name}.jsonl").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(FINISHED))
    assert suite.main(["gate", SUITE, str(tmp_path)]) == status
    shown = capsys.readouterr().out
    assert words in shown
    assert page.read_text() == (tmp_path / "report.md").read_text() == shown


def test_wrong_words_are_one_line_and_status_2(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["gate", "quickstart", str(tmp_path)]) == 2
    assert "no suite quickstart; there are quickstart-cpu, " in capsys.readouterr().err
    assert suite.main(["gate", SUITE, str(tmp_path / "absent")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected metrics.jsonl and summary.json of a run" in line


def test_a_command_that_fails_or_takes_too_long_fails_its_suite(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(minutes: float, *command: str) -> int:
        made = suite.Suite(gpus=0, minutes=minutes, command=command, gates=())
        return suite.run("made-up", made, tmp_path)

    assert run(1, "bash", "-c", "exit 3") == 1
    assert "made-up: exit 3" in capsys.readouterr().err
    assert run(0.005, "bash", "-c", "sleep 30") == 1
    assert "minutes were not enough" in capsys.readouterr().err


def test_flags_of_the_suites_are_valid_and_use_the_gpus_of_their_runner(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "rev 12", "label": "21"}\n')
    made = ("--prompt-data", str(prompts), "--eval-prompt-data", str(prompts), "--run-dir", str(tmp_path / "run"))
    for name, each in suite.read_suites().items():
        script, *flags = each.command
        assert (ROOT / script).is_file(), name
        words = ["@examples/quickstart/reverse.args", *flags, *made]
        parsed = parse_arguments(words, prog="miles-async train")
        validate(parsed.arguments, parsed.checks)
        cluster = parsed.arguments.cluster
        engines = 0 if cluster.colocate else cluster.rollout_num_gpus
        used = cluster.trainer_world_size + engines if cluster.device == "cuda" else 0
        assert used == each.gpus, name
        last = parsed.arguments.rollout.num_rollout
        assert all((gate.step <= last and gate.low < gate.high) or gate.low == gate.high == 0 for gate in each.gates)
