"""Presets of published recipes: each is accepted as it is, and --print-config shows what it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments.algorithm_checks import check_algorithm, check_critic, check_off_policy_correction
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import range_problems
from tests.unit.commands.command_line import printed

PRESETS = sorted((Path(__file__).parents[3] / "arguments/presets/algorithms").glob("*.args"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_contradicts_nothing(preset: Path) -> None:
    flags = [f"@{preset}", "--on-policy", "--n-samples-per-prompt", "8", "--num-rollout", "50"]
    flags += ["--max-weight-staleness", "0"]
    arguments = parse_arguments(flags).arguments
    checks = (range_problems, check_algorithm, check_critic, check_off_policy_correction)
    assert [problem for check in checks for problem in check(arguments)] == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("dapo", ["eps-clip-high = 0.28", "overlong-buffer-len = 4096", 'group-filter = ["zero_variance"]']),
        ("gspo", ['policy-loss = "gspo"', 'loss-aggregation = "sequence_mean"']),
        ("a-3po", ["use-tis = true", 'prox-logp-method = "loglinear"']),
        ("icepop", ['tis-mode = "mask"', "tis-clip-low = 0.5"]),
        ("ppo", ['token-advantages = "gae"', "lambd = 0.95", 'advantage-estimator = "reinforce"']),
        ("sat", ['policy-loss = "sat"', "sat-quantile = 0.9", "use-rollout-logprobs = true"]),
        ("sao", ['policy-loss = "dis"', "lambd-length-alpha = 1.5", "critic-lambd = 1.0", "n-samples-per-prompt = 1"]),
        ("vcpo", ['advantage-estimator = "opob"', 'ess-lr-scaling = "sqrt"', 'tis-level = "sequence"', "tis-clip = 8"]),
        ("reinforce-plus-plus", ["normalize-advantages = true", 'advantage-estimator = "reinforce"']),
    ],
)
def test_print_config_expands_a_preset(name: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "train", f"@preset:{name}", "--print-config")
    for line in shown:
        assert line in out


def test_every_recipe_has_a_preset() -> None:
    wanted = {"grpo", "dr-grpo", "dapo", "gspo", "cispo", "reinforce-plus-plus", "decoupled-ppo", "icepop", "m2po"}
    wanted |= {
        "clip-cov",
        "kl-cov",
        "sft",
        "on-policy-distillation",
        "ppo",
        "sat",
        "sao",
        "vcpo",
        "decoupled-ppo-snapshots",
    }
    assert wanted <= {path.stem for path in PRESETS}
