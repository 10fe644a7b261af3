"""``miles-async rollout`` and ``eval`` with real engines: estimates, two models compared, a checkpoint, Ctrl-C."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miles_async.cli import main
from miles_async.samples.columns import SampleSummary
from miles_async.samples.reader import read_note, read_summaries, samples_files
from tests.integration.real_run import QUICKSTART, ROOT, RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

PROMPTS, SAMPLES = 48, 4
REVERSE_MODEL, SORT_MODEL = (str(QUICKSTART / "assets" / task / "model") for task in ("reverse", "sort"))
HELD_OUT = f"{QUICKSTART}/assets/reverse/test.jsonl@[0:{PROMPTS}]"
FEWER = ("--prompt-data", HELD_OUT, "--n-samples-per-prompt", str(SAMPLES), "--rollout-num-gpus", "1")
SECONDS = 200.0

Started = Callable[..., RealRun]


def command(imported_reverse: tuple[str, ...], *words: str) -> tuple[str, ...]:
    """The command with ``words`` instead of those of the quick start."""
    return (*imported_reverse[: imported_reverse.index("train")], *words)


def rollout_words(model: str, data: str = HELD_OUT, samples: int = SAMPLES) -> tuple[str, ...]:
    flags = ("--device", "cpu", "--rm-type", "exact_match", "--rollout-max-response-len", "7")
    prompts = ("--prompt-data", data, "--n-samples-per-prompt", str(samples))
    return ("rollout", "--hf-checkpoint", model, *flags, *prompts)


def page_commands() -> list[tuple[str, ...]]:
    """The commands of docs/rollout.md that evaluate the quick start's model before and after training."""
    text = (ROOT / "docs/rollout.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^    \.venv/bin/miles-async (rollout @.*)$", text, re.MULTILINE)
    return [tuple(shlex.split(line)) for line in lines]


def page_blocks() -> list[str]:
    """What the page says that they print."""
    return re.findall(r"```\n(test: .*?)```", (ROOT / "docs/rollout.md").read_text(), re.DOTALL)


def rows_of(run: RealRun) -> list[SampleSummary]:
    (file,) = samples_files(run.run_dir)
    return read_summaries(file.path)


def responses(rows: list[SampleSummary]) -> dict[str, str]:
    return {row.prompt_id: row.response for row in rows}


def brute_force(rows: list[SampleSummary], k: int) -> float:
    """Share of the draws of k samples of a prompt in which one is right, averaged over prompts."""
    prompts = {row.prompt_id for row in rows}
    draws = {
        p: list(itertools.combinations([row.reward or 0.0 for row in rows if row.prompt_id == p], k)) for p in prompts
    }
    return float(np.mean([np.mean([max(draw) >= 1 for draw in of_prompt]) for of_prompt in draws.values()]))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, imported_reverse: tuple[str, ...]) -> RealRun:
    """The quick start's model on held-out prompts, by the first command of the page."""
    run_dir = tmp_path_factory.mktemp("rollout") / "before"
    with real_run(run_dir, *FEWER, command=command(imported_reverse, *page_commands()[0])) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    return run


def test_a_rollout_estimates_pass_at_k_of_all_samples_without_a_trainer(
    before: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(before)
    assert len(rows) == PROMPTS * SAMPLES
    assert {row.oldest_version for row in rows} == {0}
    record = json.loads((before.run_dir / "evaluation.json").read_text())["data_sets"]["test"]
    assert (record["prompts"], record["samples"], record["missing_samples"]) == (PROMPTS, PROMPTS * SAMPLES, 0)
    for k in (1, 2, 4):
        estimate = record["estimates"][f"pass@{k}"]
        assert estimate["mean"] == pytest.approx(brute_force(rows, k))
        assert estimate["low"] < estimate["mean"] < estimate["high"]
        assert f"pass@{k}    {estimate['mean']:.3f}" in before.output
    logs = {path.name for path in (before.run_dir / "logs").iterdir()}
    assert "engine-0.0.log" in logs
    assert not {"trainer-0.log", "rank_imports.log"} & logs
    summary = before.summary
    assert (summary["steps"], summary["groups"]["issued"], summary["ending"]) == (0, 0, "finished")
    assert main(["samples", str(before.run_dir), "--sort", "reward"]) == 0
    assert "rev " in capsys.readouterr().out


def assert_shown(block: str, output: str) -> None:
    """Check that ``output`` has the lines of a block, but for numbers, and for pass@8, which takes more samples."""
    printed = without_digits(output).splitlines()
    for line in block.splitlines():
        if "pass@8" not in line:
            assert without_digits(line) in printed


def test_the_page_shows_what_its_commands_print(before: RealRun) -> None:
    shown = page_blocks()
    prompts, samples = map(int, re.findall(r"\d+", shown[0].splitlines()[0]))
    held_out = (QUICKSTART / "assets/reverse/test.jsonl").read_text().splitlines()
    assert (prompts, samples) == (len(held_out), 8 * len(held_out))
    assert_shown(shown[0], before.output)


def without_digits(text: str) -> str:
    return re.sub(r"[-+]?\d+\.\d+", "#", re.sub(r"\d+ (prompts|samples)", r"# \1", text))


@pytest.mark.long
def test_another_model_is_compared_prompt_by_prompt(
    before: RealRun, tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    # The second command of the page, with a model that is there.
    other = ("--hf-checkpoint", SORT_MODEL, "--against", str(before.run_dir))
    with real_run(tmp_path / "sort", *FEWER, *other, command=command(imported_reverse, *page_commands()[1])) as run:
        assert run.wait(SECONDS) == 0, run.output
    found = json.loads((run.run_dir / "evaluation.json").read_text())["against"]["data_sets"]["test"]["reward"]
    expected = np.mean([row.reward for row in rows_of(run)]) - np.mean([row.reward for row in rows_of(before)])
    assert found["mean"] == pytest.approx(expected)
    assert found["prompts"] == PROMPTS
    assert found["low"] < found["high"]
    assert f"minus {before.run_dir} ({PROMPTS} prompts in both)" in run.output
    assert_shown(page_blocks()[1], run.output.replace(str(before.run_dir), "runs/before"))


@pytest.mark.long  # the first of these with prompts, turns and rewards of an environment
def test_episodes_of_an_environment_are_sampled_and_rewarded(
    tmp_path: Path, imported_reverse: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/environments"), prepend=":")
    game = ("--environment", "gymnasium:gymnasium_reverse:Reverse-v0", "--environment-prompts", "8")
    limits = ("--rollout-max-response-len", "40", "--max-tokens-per-turn", "7", "--n-samples-per-prompt", "4")
    words = ("rollout", "--device", "cpu", "--hf-checkpoint", REVERSE_MODEL, "--rollout-num-gpus", "1", *game, *limits)
    with real_run(tmp_path / "run", command=command(imported_reverse, *words)) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    rows = rows_of(run)
    assert len(rows) == 8 * 4
    assert max(row.messages.count('"assistant"') for row in rows) > 1
    (record,) = json.loads((run.run_dir / "evaluation.json").read_text())["data_sets"].values()
    assert record["estimates"]["reward"]["mean"] == pytest.approx(np.mean([row.reward for row in rows]))
    assert {row.reward for row in rows} > {0.0}


@pytest.mark.long
def test_ctrl_c_keeps_the_samples_that_are_there(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    words = rollout_words(REVERSE_MODEL, f"{QUICKSTART}/assets/reverse/train.jsonl", 8)
    with real_run(tmp_path / "run", command=command(imported_reverse, *words)) as run:
        run.wait_for_output("evaluated ", SECONDS)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, run.output
        run.assert_nothing_left()
    (file,) = samples_files(run.run_dir)
    assert read_note(file.path).why_fewer == "the evaluation was interrupted"
    record = json.loads((run.run_dir / "evaluation.json").read_text())["data_sets"]["train"]
    assert 0 < record["samples"] < 20_000 * 8
    assert record["samples"] == len(rows_of(run))
    assert "not all of it: the evaluation was interrupted" in run.output
    assert run.summary["ending"] == "interrupted"


@pytest.mark.long  # an evaluation as above, after an export
def test_a_checkpoint_is_exported_and_evaluated_as_training_evaluated_it(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    flags = ("--eval-prompt-data", HELD_OUT, "--n-samples-per-eval-prompt", "1")
    saving = ("--num-rollout", "4", "--save", str(tmp_path / "checkpoints"))
    with real_run(tmp_path / "trained", *flags, *saving, command=imported_reverse) as run:
        assert run.wait(SECONDS) == 0, run.output
    first, *_, last = (
        responses(read_summaries(file.path)) for file in samples_files(run.run_dir) if file.kind == "eval"
    )
    words = ("eval", "@examples/quickstart/reverse.args", *flags, "--load", str(tmp_path / "checkpoints"))
    words = (*words, "--against", str(run.run_dir), "--save", str(tmp_path / "others"), "--save-interval", "1")
    with real_run(tmp_path / "evaluated", command=command(imported_reverse, *words)) as again:
        assert again.wait(2 * SECONDS) == 0, again.output
        again.assert_nothing_left()
    assert responses(rows_of(again)) == last != first
    assert f"minus {run.run_dir} ({PROMPTS} prompts in both)" in again.output
