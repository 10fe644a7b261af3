"""Epochs and shares of the run become numbers of steps when the prompts are counted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async import Config, check
from miles_async.arguments import Arguments
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import flag_problems
from miles_async.errors import ConfigurationError, DataError
from miles_async.runs.counts import with_counts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "b"}\n' * 10)
    return path


def given(prompts: Path, words: str) -> Arguments:
    return parse_arguments(["--prompt-data", str(prompts), "--rollout-batch-size", "4", *words.split()]).arguments


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 5), (3, 7)])
def test_epochs_are_rollout_steps(epochs: int, steps: int, prompts: Path) -> None:
    counted = with_counts(given(prompts, f"--num-epoch {epochs}"))
    assert (counted.rollout.num_rollout, counted.rollout.num_epoch) == (steps, None)
    assert with_counts(counted) == counted


def test_epochs_may_fill_one_batch(prompts: Path) -> None:
    assert with_counts(given(prompts, "--num-epoch 2 --rollout-batch-size 20")).rollout.num_rollout == 1


def config_of(prompts: Path, words: str) -> Config:
    """The quick start's config with these prompts, and without its number of steps and its warm-up."""
    flags = f"--prompt-data {prompts} --eval-prompt-data e {prompts} --num-rollout 1 --lr-warmup-iters 0 {words}"
    return Config.from_args(["@examples/quickstart/reverse.args", *flags.split()], run_dir=prompts.parent / "run")


def test_a_dry_run_counts(prompts: Path) -> None:
    assert "rollout        5 steps of 16 prompts" in check(config_of(prompts, "--num-epoch 8"))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--profile-step 5", False),
        ("--profile-step 6", True),
        ("--token-advantages gae --num-critic-only-steps 4", False),
        ("--token-advantages gae --num-critic-only-steps 5", True),
    ],
)
def test_flags_are_compared_with_the_steps_that_were_counted(words: str, refused: bool, prompts: Path) -> None:
    arguments = given(prompts, f"--num-epoch 2 {words}")
    assert not about_steps(arguments)
    assert bool(about_steps(with_counts(arguments))) is refused


def about_steps(arguments: Arguments) -> list[str]:
    return [problem for problem in flag_problems(arguments) if "--num-rollout" in problem]


def test_the_rows_of_all_files_and_slices_count(prompts: Path) -> None:
    arguments = given(prompts, "--num-epoch 2")
    data = replace(arguments.data, prompt_data=(str(prompts), "other", f"{prompts}@[0:6]"))
    assert with_counts(replace(arguments, data=data)).rollout.num_rollout == 2 * 16 // 4


def test_a_warm_up_is_a_share_of_the_optimizer_steps(prompts: Path) -> None:
    words = "--num-epoch 4 --num-steps-per-rollout 2 --lr-warmup-fraction 0.29 --critic-lr-warmup-fraction 0.5"
    counted = with_counts(given(prompts, words))
    assert counted.optimizer_steps == 20
    assert (counted.optimizer.lr_warmup_iters, counted.optimizer.lr_warmup_fraction) == (5, None)
    assert (counted.critic.critic_lr_warmup_iters, counted.critic.critic_lr_warmup_fraction) == (10, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-epoch 2 --num-rollout 5", "--num-epoch 2 with --num-rollout 5: both say the same thing"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "--lr-warmup-fraction 0.1 with --lr-warmup-iters 5: both say"),
        ("--num-epoch 2 --prompt-data-weights 1", "--num-epoch 2 with --prompt-data-weights, which draw rows"),
        ("--num-epoch 0", "--num-epoch: expected at least 1, or none, found 0"),
        ("--lr-warmup-fraction 10", "--lr-warmup-fraction: expected at least 0 and at most 1, or none, found 10"),
        ("--critic-lr-warmup-fraction 0.1", "--critic-lr-warmup-fraction 0.1 has no effect without --token-advantages"),
    ],
)
def test_the_flags_themselves_are_compared_first(words: str, message: str, prompts: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check(config_of(prompts, words))


def test_an_epoch_that_fills_no_batch_is_refused(prompts: Path) -> None:
    message = "--num-epoch 2: 2 × 10 prompts do not fill one --rollout-batch-size 32"
    with pytest.raises(ConfigurationError, match=message):
        with_counts(given(prompts, "--num-epoch 2 --rollout-batch-size 32"))


def test_an_evaluation_alone_counts_nothing(prompts: Path) -> None:
    arguments = given(prompts, "--num-epoch 1 --rollout-batch-size 32 --eval-only")
    assert with_counts(arguments) == arguments


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        with_counts(given(tmp_path / "absent.jsonl", "--num-epoch 1"))
