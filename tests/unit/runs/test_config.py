"""Flags from Python are those of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import miles_async
from miles_async.arguments.parser import parse_arguments
from miles_async.errors import ConfigurationError

HEAVY = ("torch", "ray", "transformers", "pyarrow", "pandas", "matplotlib")


@pytest.mark.parametrize(
    "use", ["", "miles_async.Config.from_args(lr=1e-6)", "miles_async.start; miles_async.attach; miles_async.check"]
)
def test_importing_and_reading_flags_loads_nothing_heavy(use: str) -> None:
    program = f"import sys, miles_async\n{use}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_package_itself_loads_none_of_its_modules() -> None:
    program = "import sys, miles_async\nprint([name for name in sys.modules if name.startswith('miles_async.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_keyword_arguments_are_the_words_of_a_command_line_and_win(tmp_path: Path) -> None:
    words = ["@preset:staleness-2", "--lr", "1e-3", "--use-wandb"]
    config = miles_async.Config.from_args(
        words,
        lr=1e-6,
        num_rollout=7,
        use_wandb=False,
        share_prefixes=True,
        save_hf=None,
        run_dir=tmp_path,
        rollout_stop=["</answer>", "\n"],
        sglang_mem_fraction_static=0.8,
    )
    typed = ["--lr", "1e-6", "--num-rollout", "7", "--no-use-wandb", "--share-prefixes", "--save-hf", "none"]
    typed += ["--run-dir", str(tmp_path), "--rollout-stop", "</answer>", "\n", "--sglang-mem-fraction-static", "0.8"]
    assert config.arguments == parse_arguments([*words, *typed]).arguments
    assert config.arguments.staleness.max_weight_staleness == 2
    assert (
        config.having("--lr", "1e-4", num_rollout=8).arguments
        == parse_arguments([*words, *typed, "--lr", "1e-4", "--num-rollout", "8"]).arguments
    )


def test_an_argument_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.args"
    file.write_text("--lr 1e-3 --run-dir runs/one")
    monkeypatch.chdir(tmp_path)
    config = miles_async.Config.from_args(["@run.args"])
    file.write_text("--lr 1e-4")
    monkeypatch.chdir(tmp_path.parent)
    assert config.having() == config
    assert config.having().arguments == config.arguments
    assert config.words == ("--lr", "1e-3", "--run-dir", "runs/one")


@pytest.mark.parametrize("texts", [["@user"], ["@@user", "@", "@@", "a@b"]])
def test_a_value_that_begins_with_an_at_sign_is_no_file(texts: list[str]) -> None:
    """Neither from a program, nor in the copies and processes that read its words again."""
    config = miles_async.Config.from_args(rollout_stop=texts, wandb_group="@group")
    for each in (config, config.having(num_rollout=2), miles_async.Config.read(config.words)):
        assert each.arguments.rollout.rollout_stop == tuple(texts)
        assert each.arguments.observability.wandb_group == "@group"


def test_two_at_signs_are_one_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "run.args").write_text("--rollout-stop @@user '@@ b'")
    config = miles_async.Config.from_args([f"@{tmp_path / 'run.args'}", "--wandb-group", "@@group"])
    assert config.arguments.rollout.rollout_stop == ("@user", "@ b")
    assert config.arguments.observability.wandb_group == "@group"


def test_every_wrong_name_is_reported_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)--learning-rat.*--num-rolout"):
        miles_async.Config.from_args(learning_rat=1.0, num_rolout=3)


def test_values_that_no_flag_takes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--custom-rm-path; functions and classes are arguments of"):
        miles_async.Config.from_args(custom_rm_path=len)
    with pytest.raises(ConfigurationError, match=r"expected a list of words, such as \['--lr', '1'\]"):
        miles_async.Config.from_args("--lr 1")
    with pytest.raises(ConfigurationError, match="--dry-run are for the command line"):
        miles_async.Config.from_args(["--dry-run"])


def test_what_the_package_lacks_is_named() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = miles_async.absent


def test_words_in_the_place_of_a_config_are_refused_by_name() -> None:
    for use in (miles_async.start, miles_async.check):
        with pytest.raises(ConfigurationError, match=r"expected a Config, such as Config.from_args\(\[...\]\), found"):
            use(["@run.args"])
    assert {"Config", "Run", "start", "attach", "check"} <= {*dir(miles_async)}
