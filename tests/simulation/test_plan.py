"""``miles-async plan``: what it predicts, recommends and refuses."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from miles_async.arguments import StalenessArguments
from miles_async.cli import main
from miles_async.simulation.distributions import Fixed, LogNormal, Trace
from miles_async.simulation.plan import DEFAULT_SWEEP, Prediction, candidates, recommend
from miles_async.simulation.plan_view import rollout_process_text
from miles_async.simulation.result import SimulationResult

QUICK = [
    "plan", "--latency", "lognormal:20:0.5", "--train-seconds", "60", "--publish-seconds", "1",
    "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-num-gpus", "2",
    "--rollout-concurrency-per-engine", "8", "--use-rollout-logprobs", "--steps", "20",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_candidates_are_every_combination() -> None:
    assert list(candidates(["max-weight-staleness=1,none", "--max-rollout-lead=1,2"])) == [
        "--max-weight-staleness 1 --max-rollout-lead 1",
        "--max-weight-staleness 1 --max-rollout-lead 2",
        "--max-weight-staleness none --max-rollout-lead 1",
        "--max-weight-staleness none --max-rollout-lead 2",
    ]
    assert tuple(candidates([])) == DEFAULT_SWEEP


def test_it_recommends_the_smallest_age_that_is_fast_enough(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C3, C4
    assert main([*QUICK, "--sweep", "max-weight-staleness=0,1,2,4,6"]) == 0
    printed = capsys.readouterr().out
    # Age 0 alternates and is far slower, 1 is slower, 2 throws tokens away; ages above 4 bring nothing here.
    recommended = next(line for line in printed.splitlines() if line.startswith("Recommended"))
    assert "--max-weight-staleness 4" in recommended
    assert "T_rollout" in recommended
    assert printed.count("max-weight-staleness") == 6


def test_fewer_gpus_than_an_engine_has_are_refused_unless_engines_are_external(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*QUICK, "--rollout-num-gpus-per-engine", "4", "--sweep", "max-weight-staleness=1"]
    assert main(words) == 2
    assert "there would be no engine" in capsys.readouterr().err
    assert main([*words, "--rollout-external", "a:1", "b:2"]) == 0


@pytest.mark.parametrize("seconds", ["1e9", "lognormal:60:9", "9e4"])
def test_a_step_of_more_than_a_day_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--train-seconds", seconds, "--sweep", "max-weight-staleness=1"]) == 2
    assert "--train-seconds: expected steps of at most 86400 s (a day), found one of" in capsys.readouterr().err


def row(bound: int, lead: int, **result: float) -> Prediction:
    """A candidate as far as it is looked at."""
    staleness = StalenessArguments(max_weight_staleness=bound, max_rollout_lead=lead)
    return Prediction(
        label=f"{bound} {lead}", staleness=staleness, result=cast(SimulationResult, SimpleNamespace(**result))
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 2, 1.2, 0.0), (2, 3, 1.04, 0.0), (4, 3, 1.0, 0.0)], "2 3"),  # younger data is worth 5 %
        ([(2, 3, 1.0, 0.03), (4, 3, 1.0, 0.01), (4, 2, 1.0, 0.019)], "4 2"),  # and 2 % waste is too much
        ([(0, 1, 2.5, 0.0), (2, 3, 1.0, 0.03), (4, 3, 1.0, 0.03)], "2 3"),  # but no reason to be slow
    ],
)
def test_it_weighs_age_against_time_and_waste(rows: list[tuple[int, int, float, float]], expected: str) -> None:
    # covers: C4
    recommended = recommend(
        row(bound, lead, step_seconds=seconds, wasted_fraction=waste) for bound, lead, seconds, waste in rows
    )
    assert recommended.label == expected


def test_a_recommendation_that_throws_tokens_away_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C5
    uneven = ["--latency", "lognormal:20:1.5", "--train-seconds", "10", "--sweep", "max-weight-staleness=1"]
    assert main([*QUICK, *uneven]) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "of the tokens are thrown away: try a higher bound" in printed
    assert "The rollout process needs" in printed


@pytest.mark.parametrize(
    ("step_seconds", "said"),
    [(80.0, "needs 10% of a core, at 1 ms per sample"), (10.0, "needs 82% of a core.*it is the bottleneck")],
)
def test_a_rollout_process_that_could_not_keep_up_is_told(step_seconds: float, said: str) -> None:
    told = rollout_process_text(row(1, 2, step_seconds=step_seconds, samples_per_step=8192).rollout_cores)
    assert re.search(said, told)
    assert ("bottleneck" in told) is ("bottleneck" in said)


def test_seconds_outside_of_engines_are_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C5
    """A slow reward makes as many samples too old as slow responses do, but these cost no more tokens than others."""
    settings = ["--train-seconds", "10", "--sweep", "max-weight-staleness=1"]
    slow = "lognormal:20:1.5"

    def predicted(*latency: str) -> tuple[float, float]:
        assert main([*QUICK, *settings, *latency]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "max-weight-staleness" in line)
        stale, waste = line.split()[-2:]
        return float(stale.rstrip("%")), float(waste.rstrip("%"))

    in_tokens = predicted("--latency", slow)
    in_rewards = predicted("--latency", "fixed:0.5", "--reward-seconds", slow)
    in_environments = predicted("--latency", "fixed:0.5", "--environment-seconds", slow)
    for stale, waste in (in_rewards, in_environments):
        assert stale > 5
        assert waste == pytest.approx(stale, abs=1.5)  # all samples have as many tokens
    assert in_tokens[1] > 1.5 * in_tokens[0]  # long responses are those that are thrown away


def test_the_bound_is_what_its_footnote_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--copy-seconds", "7", "--sweep", "max-weight-staleness=1"]
    assert main([*QUICK, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    formula = printed.partition("bound: ")[2].partition(". engines")[0]
    numbers = dict(re.findall(r"(T_\w+) ([\d.]+)", printed.partition("the bound of")[2]))
    assert set(numbers) == set(re.findall(r"T_\w+", formula)) == {"T_rollout", "T_pause", "T_train", "T_copy"}
    bound = float(re.search(r"the bound of ([\d.]+) s", printed)[1])  # type: ignore[index]
    of_formula = eval(formula, {"max": max, **{name: float(number) for name, number in numbers.items()}})
    assert of_formula == pytest.approx(bound, rel=0.01)
    assert bound == pytest.approx(67, rel=0.01)


def test_a_plan_that_cannot_work_is_refused_with_the_flag_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C3
    assert main([*QUICK, "--sweep", "max-weight-staleness=0,1", "--sweep", "max-rollout-lead=2"]) == 0
    printed = capsys.readouterr().out
    assert "Refused: --max-weight-staleness 0 --max-rollout-lead 2" in printed
    assert "lower the lead to 1 or raise the bound" in printed


def test_nothing_that_works_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C3
    assert main([*QUICK, "--sweep", "max-weight-staleness=0", "--sweep", "max-rollout-lead=2,3"]) == 2
    assert "lower the lead to 1" in capsys.readouterr().err


def test_a_stall_is_a_refusal_that_says_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C3, C10
    stalling = ["--latency", "fixed:5000", "--request-timeout", "100", "--max-sample-failures", "100000"]
    assert main([*QUICK, *stalling, "--stall-timeout", "600", "--sweep", "max-weight-staleness=1"]) == 2
    assert "--stall-timeout" in capsys.readouterr().err


def test_one_step_has_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--sweep", "max-weight-staleness=1", "--steps", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("max-weight-staleness")]
    assert float(line.split()[2]) > 60  # generation and training


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.png"
    assert main([*QUICK, "--sweep", "max-weight-staleness=0,1", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--latency", "soon"], "--latency soon: expected SECONDS"),
        (["--sweep", "max-rollout-lead"], "expected FLAG=VALUE,VALUE"),
        (["--sweep", "max-rollout-leed=1"], "did you mean --max-rollout-lead?"),
        (["--steps", "0"], "--steps"),
        (["--bogus", "1"], "unknown flag --bogus"),
    ],
)
def test_wrong_words_are_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_of_trainer_ranks_scales_the_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--train-seconds", "400", "--sweep", "actor-num-gpus-per-node=1,2"]
    assert main([*QUICK, *slow]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [float(line.split()[2]) for line in lines if line.strip().startswith("actor-num-gpus-per-node")]
    assert steps[0] == pytest.approx(401, rel=0.02)
    assert steps[1] == pytest.approx(201, rel=0.05)


def test_scaling_keeps_the_shape() -> None:
    assert Fixed(4.0).scaled(0.5) == Fixed(2.0)
    assert LogNormal(4.0, 0.3, 8.0).scaled(0.5) == LogNormal(2.0, 0.3, 4.0)
    assert Trace((2.0, 4.0)).scaled(0.5) == Trace((1.0, 2.0))
