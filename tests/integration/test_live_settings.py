"""A real run whose settings change while it is live: what each change does, its replay, and a run that resumes.

# covers: C1, C2, C9, C11
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from miles_async.commands.ledger import ledger
from miles_async.commands.live_set import set_live
from miles_async.commands.replay import replay
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject
from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_ROLLOUT, SECONDS = 60, 240
LR, LOWER_LR = 5e-4, 1e-4
KL_COEF, HIGHER_KL_COEF, ENTROPY_COEF = 0.1, 0.5, 0.01
FLAGS = ("--rollout-num-gpus", "1", "--no-log-entropy", "--record")  # train/entropy comes with the bonus only
FLAGS += ("--use-kl-loss", "--kl-loss-coef", str(KL_COEF))


def change(run: RealRun, *changes: str) -> int:
    """Set it and return the step after which it takes effect."""
    answer = set_live([str(run.run_dir), *changes])
    [step] = {int(found) for found in re.findall(r"after step (\d+)", answer)}
    return step


def by_step(run: RealRun) -> dict[int, JsonObject]:
    return {record["step"]: record for record in run.steps}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory, imported_reverse: tuple[str, ...]) -> tuple[RealRun, Path, dict]:
    """A run that was changed, paused and stopped; its checkpoints; the steps after which things took effect."""
    directory = tmp_path_factory.mktemp("live")
    saved, steps = directory / "saved", {}
    flags = ("--num-rollout", str(NUM_ROLLOUT), "--save", str(saved), *FLAGS)
    with real_run(directory / "run", *flags, command=imported_reverse) as run:
        run.wait_for_steps(2, SECONDS)
        with pytest.raises(
            ConfigurationError, match=r"--max-rollout-lead 2 is more than --max-weight-staleness 0 \+ 1"
        ):
            set_live([str(run.run_dir), "max-weight-staleness=0"])
        with pytest.raises(ConfigurationError, match="expected at most 256"):
            set_live([str(run.run_dir), "rollout-concurrency-per-engine=512", "lr=1e-5"])
        steps["bound"] = change(run, "max-weight-staleness=0", "max-rollout-lead=1")
        coefficients = (f"entropy-coef={ENTROPY_COEF}", f"kl-loss-coef={HIGHER_KL_COEF}")
        steps["trainer"] = change(run, f"lr={LOWER_LR}", *coefficients, "rollout-concurrency-per-engine=64")
        assert f"lr {LOWER_LR:g}" in set_live([str(run.run_dir)]).replace(f"{LR:g} → ", "")
        steps["now"] = change(run, "evaluation=now", "checkpoint=now")
        run.wait_for_steps(steps["now"] + 2, SECONDS)
        assert set_live([str(run.run_dir), "generation=paused"]) == "generation paused, from now on\n"
        assert "generation paused" in set_live([str(run.run_dir)])
        assert set_live([str(run.run_dir), "generation=running"]) == "generation running, from now on\n"
        steps["stop"] = change(run, "max-weight-staleness=1", "stop=after-step")
        assert run.wait(90) == 0, run.output
        run.assert_nothing_left()
    return run, saved, steps


def test_bound_and_lead_hold_from_the_next_step_on(changed: tuple[RealRun, Path, dict]) -> None:
    run, _, steps = changed
    for step, record in by_step(run).items():
        bound = 2 if step <= steps["bound"] else 0
        assert record["age/bound"] == bound
        assert record["age/max"] <= bound
    assert by_step(run)[steps["bound"] + 2]["rollout/lead_limit"] == 16


def test_the_trainer_and_the_engines_follow(changed: tuple[RealRun, Path, dict]) -> None:
    run, _, steps = changed
    for step, record in by_step(run).items():
        after = step > steps["trainer"]
        assert record["train/lr"] == pytest.approx(LOWER_LR if after else LR)
        assert ("train/entropy" in record) is after
        penalty = (HIGHER_KL_COEF if after else KL_COEF) * record["train/ref_kl"]
        penalty -= ENTROPY_COEF * record.get("train/entropy", 0.0)
        assert record["train/loss"] == pytest.approx(record["train/policy_loss"] + penalty, abs=1e-6)
    assert by_step(run)[steps["trainer"] + 2]["rollout/concurrency_limit"] == 64


def test_it_evaluates_saves_and_stops_where_it_said(changed: tuple[RealRun, Path, dict]) -> None:
    run, saved, steps = changed
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"] for line in lines if line["kind"] == "evaluation"}
    assert {0, steps["now"], steps["stop"]} <= evaluated
    assert max(by_step(run)) == steps["stop"] < NUM_ROLLOUT
    assert {path.name for path in saved.iterdir()} == {f"iter_{steps[name]:07}" for name in ("now", "stop")}
    assert run.summary["ending"] == "finished"
    assert run.summary["balanced"]


def test_everything_is_in_the_ledger(changed: tuple[RealRun, Path, dict]) -> None:
    run, _, steps = changed
    shown = ledger([str(run.run_dir)])
    for line in (
        f"set after step {steps['bound']}: max-weight-staleness 2 → 0",
        f"set after step {steps['trainer']}: lr {LR} → {LOWER_LR}",
        f"set after step {steps['now']}: checkpoint now",
        f"set after step {steps['stop']}: stop after-step",
    ):
        assert line in shown
    assert re.search(
        r"set after step \d+: generation running → paused\nset after step \d+: generation paused → ", shown
    )


def test_a_replay_decides_as_the_run_did(changed: tuple[RealRun, Path, dict]) -> None:
    run, _, steps = changed
    assert f"steps 1 to {steps['stop']}" in [*replay([str(run.run_dir)])][-1]


@pytest.mark.long
def test_a_run_that_resumes_continues_with_the_changes(
    changed: tuple[RealRun, Path, dict], tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    _, saved, steps = changed
    last = steps["stop"] + 3
    flags = ("--load", str(saved), "--num-rollout", str(last), *FLAGS)
    with real_run(tmp_path / "resumed", *flags, command=imported_reverse) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert "--max-weight-staleness 1 instead of 2: set before the checkpoint was written" in run.output
    config = tomllib.loads((run.run_dir / "config.toml").read_text())
    assert (config["optimizer"]["lr"], config["algorithm"]["kl-loss-coef"]) == (LOWER_LR, HIGHER_KL_COEF)
    for step in range(steps["stop"] + 1, last + 1):
        record = by_step(run)[step]
        assert record["age/bound"] == 1
        assert record["train/lr"] == pytest.approx(LOWER_LR)
        assert "train/entropy" in record
    assert f"to {last}" in [*replay([str(run.run_dir)])][-1]
