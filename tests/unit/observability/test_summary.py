"""summary.json: its arithmetic, its keys, and how it is printed."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from miles_async.observability.summary import RunSummary, Summary, write_summary
from miles_async.observability.summary_view import balance_line, print_summary

BALANCE = {"issued": 20, "trained": 12, "recycled": 2, "failed": 1, "in_flight": 3, "buffered": 2}


def seven_steps() -> RunSummary:
    """Rewards 0.1 .. 0.7, each step 2 s of which 0.5 s waiting; two publications, two evaluations."""
    summary = RunSummary()
    for step in range(7):
        metrics = {
            "reward/mean": (step + 1) / 10,
            "time/step_seconds": 2.0,
            "time/wait_seconds": 0.5,
            "train/logprob_diff_mean": 1e-6 if step else 3e-6,
            "train/logprob_diff_max": 1e-5 * (step + 1),
            "train/logprob_diff_tokens": 100.0 if step else 300.0,
        }
        summary.record_step(metrics, {0: 6, step % 3: 2})
    summary.record_publication(pause_seconds=9.0, prepare_seconds=0.2)
    summary.record_publication(pause_seconds=0.2, prepare_seconds=0.1)
    summary.record_publication(pause_seconds=0.4, prepare_seconds=0.3)
    summary.record_eval(0.15)
    summary.record_eval(0.95)
    return summary


def finished(summary: RunSummary, balance: Mapping[str, int] = BALANCE, **rollout: float) -> Summary:
    return summary.finish(balance, wall_seconds=60.0, weight_version=2, **rollout)


def test_summary_has_the_promised_keys_and_numbers() -> None:
    # covers: M3
    result = finished(seven_steps())
    assert result["steps"] == 7
    assert result["wall_seconds"] == 60.0
    assert result["reward_first"] == pytest.approx(0.1)
    assert result["reward_last"] == pytest.approx(0.5)  # mean of 0.3 .. 0.7
    assert (result["eval_reward_first"], result["eval_reward_last"]) == (0.15, 0.95)
    assert result["age_max"] == 2
    assert result["age_histogram"] == {"0": 4 * 6 + 3 * 2, "1": 4, "2": 4}  # {0: 2} replaces {0: 6} in 3 steps
    assert result["publish"] == {
        "count": 3,
        "pause_seconds_mean": pytest.approx(0.3),  # nothing is generated before the first one
        "prepare_seconds_mean": pytest.approx(0.2),
    }
    assert result["weight_version"] == 2
    assert result["stage_seconds"] == {"step": 14.0, "wait": 3.5}


def test_idle_is_a_fraction_of_the_time_it_was_measured_in_not_of_start_up() -> None:
    result = finished(seven_steps(), rollout_idle_seconds=7.0, rollout_seconds=28.0)
    assert result["trainer_idle_fraction"] == pytest.approx(3.5 / 14)
    assert result["rollout_idle_fraction"] == pytest.approx(7 / 28)


def test_a_short_run_with_long_evaluations_is_not_idle_all_the_time() -> None:
    """The rollout side's seconds go on between steps."""
    short = finished(seven_steps(), rollout_idle_seconds=20.0, rollout_seconds=40.0)
    assert short["rollout_idle_fraction"] == pytest.approx(0.5)
    assert finished(seven_steps())["rollout_idle_fraction"] is None  # not measured


def test_logprob_difference_is_weighted_by_tokens_and_skips_steps_without_any() -> None:
    summary = seven_steps()
    unmeasured = {"train/logprob_diff_mean": 9.0, "train/logprob_diff_max": 9.0, "train/logprob_diff_tokens": 0.0}
    summary.record_step(unmeasured, {})
    difference = finished(summary)["logprob_diff"]
    assert difference["mean"] == pytest.approx((300 * 3e-6 + 600 * 1e-6) / 900)
    assert difference["max"] == pytest.approx(7e-5)


def test_a_balance_that_adds_up_and_one_that_does_not() -> None:
    # covers: C2
    good = finished(seven_steps())
    assert good["balanced"]
    assert good["groups"] == {**BALANCE, **dict.fromkeys(("dropped", "filtered", "quarantined", "cancelled"), 0)}
    assert balance_line(good) == "issued 20 = trained 12 + recycled 2 + failed 1 + in flight 3 + buffered 2 groups"
    bad = finished(seven_steps(), {**BALANCE, "issued": 21})
    assert not bad["balanced"]
    assert "≠" in balance_line(bad)


def test_a_run_that_ended_before_its_first_step_is_valid_json_of_nulls(tmp_path: Path) -> None:
    result = RunSummary().finish({}, wall_seconds=0.0, weight_version=0)
    write_summary(result, tmp_path / "run" / "summary.json")
    read = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert read["steps"] == 0
    assert read["reward_last"] is None
    assert read["age_max"] is None
    assert read["trainer_idle_fraction"] is None
    assert read["logprob_diff"] == {"mean": None, "max": None}
    print_summary(result, tmp_path, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_printed_summary_shows_reward_ages_and_balance(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    print_summary(finished(seven_steps()), Path("runs/x"), console=console)
    text = output.getvalue()
    for expected in ("0.100 → 0.500", "0.150 → 0.950", "max 2", "issued 20 = trained 12", "trainer 25%", "runs/x"):
        assert expected in text
    assert ("\x1b[" in text) is terminal  # colours only where they can be seen
