"""Where the values of the presets of published recipes come from: the table here is what each stands for, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_async.arguments.algorithm_checks import check_algorithm, check_critic, check_off_policy_correction
from miles_async.arguments.argument_files import expand_argument_files
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import range_problems

PRESETS = Path(__file__).parents[3] / "arguments/presets/algorithms"
RECIPES = {
    "a-3po": """
        --advantage-estimator grpo | AReaL, examples/math/gsm8k_grpo.yaml, reward_norm
        --policy-loss ppo_clip | arXiv 2505.24298, section 5.2
        --eps-clip 0.2 | cli_args.py, eps_clip; 0.4 in examples/math
        --use-tis | arXiv 2505.24298, section 5.2
        --tis-mode mask | cli_args.py, rejection_sampling.action
        --tis-clip 5 | cli_args.py, rejection_sampling.upper
        --prox-logp-method loglinear | AReaL, examples/experimental/prox_approx
    """,
    "cispo": """
        --advantage-estimator grpo | section 3.1
        --policy-loss cispo | equations 4 and 5
        --eps-clip 1 | section 3.1: no lower bound
        --eps-clip-high 0.28 | not given; that of DAPO. verl's examples/cispo_trainer has 0.2
        --loss-aggregation token_mean | equation 4
    """,
    "clip-cov": """
        --advantage-estimator grpo | script, adv_estimator
        --policy-loss clip_cov | equations 11 and 12
        --eps-clip 1 | script, clip_ratio_low
        --eps-clip-high 1 | script, clip_ratio_high
        --eps-clip-c 10 | script, clip_ratio_c
        --clip-cov-ratio 2e-4 | script, clip_cov_ratio
        --clip-cov-lb 1.0 | script, clip_cov_lb
        --clip-cov-ub 5.0 | script, clip_cov_ub
        --loss-aggregation token_mean | script, loss_agg_mode
    """,
    "dapo": """
        --advantage-estimator grpo | equation 9
        --policy-loss ppo_clip | equation 8
        --eps-clip 0.2 | section 4.1
        --eps-clip-high 0.28 | section 4.1, after 3.1
        --loss-aggregation token_mean | section 3.3
        --group-filter zero_variance | section 3.2
        --rollout-max-response-len 20480 | section 4.1: 16384 and the buffer
        --overlong-buffer-len 4096 | section 4.1, after 3.4
    """,
    "decoupled-ppo-snapshots": """
        --advantage-estimator grpo | AReaL, examples/math/gsm8k_grpo.yaml, reward_norm
        --policy-loss ppo_clip | arXiv 2505.24298, section 5.2
        --eps-clip 0.2 | cli_args.py, eps_clip; 0.4 in examples/math
        --use-tis | arXiv 2505.24298, section 5.2
        --tis-mode mask | cli_args.py, rejection_sampling.action
        --tis-clip 5 | cli_args.py, rejection_sampling.upper
        --prox-logp-method snapshots | the paper's exact old log-probs
        --tis-mode mask | the paper's mask of the discrepancy
        --tis-clip-low 0.5 | ours
        --tis-clip 2 | ours
    """,
    "decoupled-ppo": """
        --advantage-estimator grpo | AReaL, examples/math/gsm8k_grpo.yaml, reward_norm
        --policy-loss ppo_clip | arXiv 2505.24298, section 5.2
        --eps-clip 0.2 | cli_args.py, eps_clip; 0.4 in examples/math
        --use-tis | arXiv 2505.24298, section 5.2
        --tis-mode mask | cli_args.py, rejection_sampling.action
        --tis-clip 5 | cli_args.py, rejection_sampling.upper
    """,
    "dppo": """
        --advantage-estimator grpo | appendix C.1
        --no-grpo-std-normalization | appendix C.1; script, norm_adv_by_std_in_grpo
        --policy-loss dppo_tv | sections 4.3 and 4.4, equation 13
        --eps-clip 0.15 | appendix C.1, δ (0.05 for KL; appendix E has 0.2 with ratios of at most 5)
        --eps-clip-high 0.15 | appendix C.1, δ
        --eps-clip-c none | appendix C.1, C = ∞; script, clip_ratio_c
        --use-rollout-logprobs | section 5.2; script, bypass_mode
        --loss-aggregation sequence_sum | script, loss_agg_mode
        --loss-length-normalizer 8192 | script, max_response_length; set yours
    """,
    "dr-grpo": """
        --advantage-estimator grpo | section 3.2
        --no-grpo-std-normalization | section 3.2
        --policy-loss ppo_clip | section 3.2
        --eps-clip 0.2 | table 6
        --loss-aggregation sequence_sum | section 3.2; train_zero_math.py, constant_normalizer
        --loss-length-normalizer 3000 | examples/qwen2.5-math-7b.sh, generate_max_length; set yours
    """,
    "gmpo": """
        --advantage-estimator grpo | as in GRPO
        --policy-loss gmpo | the paper's loss
        --eps-clip 0.4 | scripts/qwen2.5-math-7b-gmpo.sh, CLIPRANGE
        --loss-aggregation sequence_mean | the paper's mean
    """,
    "grpo": """
        --advantage-estimator grpo | section 4.1.2
        --policy-loss ppo_clip | equation 3
        --eps-clip 0.2 | not given; that of PPO (arXiv 1707.06347, table 1)
        --loss-aggregation sequence_mean | equation 3
        --use-kl-loss | equation 3
        --kl-loss-coef 0.04 | section 4.2
        --kl-loss-type k3 | equation 4
    """,
    "gspo": """
        --advantage-estimator grpo | equation 6
        --policy-loss gspo | equation 5
        --eps-clip 3e-4 | section 5.1
        --eps-clip-high 4e-4 | section 5.1
        --loss-aggregation sequence_mean | equation 5
    """,
    "icepop": """
        --advantage-estimator grpo | as in GRPO
        --policy-loss ppo_clip | as in GRPO
        --eps-clip 0.2 | as in GRPO
        --use-tis | the paper's mask on both sides
        --tis-mode mask | the paper's mask on both sides
        --tis-clip-low 0.5 | algorithm.py, decoupled_token_icepop
        --tis-clip 5 | algorithm.py, decoupled_token_icepop
    """,
    "kl-cov": """
        --advantage-estimator grpo | script, adv_estimator
        --policy-loss kl_cov | equations 13 and 14
        --kl-cov-ratio 2e-4 | script, k_percent=0.02; 7b_kl_cov.sh has ten times that
        --ppo-kl-coef 1.0 | script, ppo_kl_coef
        --loss-aggregation token_mean | script, loss_agg_mode
    """,
    "m2po": """
        --advantage-estimator grpo | script, adv_estimator
        --policy-loss ppo_clip | the paper's objective: the ratio, without a clip
        --eps-clip 1e9 | the paper's objective has no clip
        --eps-clip-c none | the paper's objective has no clip
        --use-tis | the paper's ratio is to the policy that sampled
        --tis-clip 1e9 | the paper's ratio has no bound
        --m2-threshold 0.04 | script, M2_budget
    """,
    "on-policy-distillation": """
        --use-opd | train_on_policy.py
        --advantage-estimator on_policy_distillation | train_on_policy.py: the KL alone
        --opd-kl-coef 1.0 | train_on_policy.py, kl_penalty_coef
        --opd-student trainer | ours
        --policy-loss ppo_clip | ours
    """,
    "ppo": """
        --advantage-estimator reinforce | the reward itself; the critic is the baseline
        --token-advantages gae | equation 11
        --gamma 1 | train_policy.py, gamma
        --lambd 0.95 | train_policy.py, lam
        --normalize-advantages | train_policy.py, whiten(advantages)
        --policy-loss ppo_clip | equation 7
        --eps-clip 0.2 | train_policy.py, cliprange
        --value-clip 0.2 | train_policy.py, cliprange_value
    """,
    "reinforce-plus-plus-baseline": """
        --advantage-estimator grpo | section 3.2; script, reinforce_baseline
        --no-grpo-std-normalization | section 3.2
        --normalize-advantages | section 3.2
        --policy-loss ppo_clip | section 3.3
        --eps-clip 0.2 | openrlhf/cli/train_ppo_ray.py, eps_clip
        --use-kl-loss | script, kl.use_loss
        --kl-loss-coef 1e-5 | script, kl.init_coef
        --kl-loss-type k2 | script, kl.estimator
    """,
    "reinforce-plus-plus": """
        --advantage-estimator reinforce | section 3.1
        --token-advantages kl_in_reward | section 3.1
        --kl-coef 0.01 | train_ppo_ray.py, kl.init_coef
        --normalize-advantages | section 3.1
        --policy-loss ppo_clip | section 3.3
        --eps-clip 0.2 | train_ppo_ray.py, eps_clip
    """,
    "sao": """
        --n-samples-per-prompt 1 | section 3
        --advantage-estimator reinforce | the reward itself; the critic is the baseline
        --token-advantages gae | section 3.2
        --lambd-length-alpha 1.5 | section 4.1
        --critic-lambd 1 | section 4.1
        --critic-updates-per-step 2 | section 3.2
        --num-critic-only-steps 10 | section 4.1
        --value-clip none | not given
        --policy-loss dis | section 3.1
        --eps-clip 0.3 | section 4.1, reasoning; 0.8 for coding
        --eps-clip-high 5 | section 4.1, reasoning; 3 for coding
        --use-rollout-logprobs | section 3.1
        --loss-aggregation token_mean | section 3.1
    """,
    "sapo": """
        --advantage-estimator grpo | as in GRPO
        --policy-loss sapo | the paper's loss
        --tau-pos 1 | actor.yaml, tau_pos
        --tau-neg 1.05 | actor.yaml, tau_neg
        --loss-aggregation sequence_mean | the paper's mean
    """,
    "sat": """
        --advantage-estimator grpo | authors' page, SAT-GRPO
        --policy-loss sat | authors' page, equations 3.1 to 3.6
        --sat-quantile 0.9 | authors' page
        --eps-clip 0.2 | authors' page
        --eps-clip-c none | authors' page
        --use-rollout-logprobs | authors' page, equation 3.1
        --use-kl-loss | authors' page
        --kl-loss-coef 1e-3 | authors' page
        --kl-loss-type low_var_kl | authors' page
    """,
    "sft": """
        --loss-type sft_loss | arXiv 2203.02155, section 3.5
        --n-samples-per-prompt 1 | one answer per row
    """,
    "vcpo": """
        --advantage-estimator opob | script, update_policy_per_traj
        --policy-loss ppo_clip | script, clip_ratio_high: the ratio, without a clip
        --eps-clip 1e9 | script, clip_ratio_high
        --eps-clip-c none | script, clip_ratio_c
        --use-tis | script, rollout_is
        --tis-level sequence | script, rollout_is
        --tis-clip 8 | script, rollout_is_threshold
        --ess-lr-scaling sqrt | script, ess_scaling_scaling_rule
        --loss-aggregation sequence_mean | script, loss_agg_mode
    """,
}
"""Preset → its flags in order, each with the source that its comment names."""


def cited(preset: Path) -> Iterator[str]:
    """The lines of ``preset`` and of those that it includes, as ``flag value | source``."""
    for line in preset.read_text().splitlines():
        if line.startswith("@"):
            yield from cited(preset.parent / line[1:])
        elif not line.startswith("#"):
            words, _, source = line.partition("#")
            yield f"{words.strip()} | {source.strip()}"


def test_every_preset_is_in_the_table() -> None:
    assert sorted(RECIPES) == sorted(file.stem for file in PRESETS.glob("*.args"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_has_the_values_of_its_sources_and_names_them(name: str) -> None:
    table = [line.strip() for line in RECIPES[name].strip().splitlines()]
    assert list(cited(PRESETS / f"{name}.args")) == table
    flags = [word for line in table for word in line.partition(" | ")[0].split()]
    assert expand_argument_files([f"@preset:{name}"]) == flags
    assert all(line.partition(" | ")[2] for line in table), "a value without a source"


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_contradicts_nothing(name: str) -> None:
    flags = [f"@preset:{name}", "--on-policy", "--n-samples-per-prompt", "8", "--num-rollout", "50"]
    arguments = parse_arguments(flags).arguments
    checks = (range_problems, check_algorithm, check_critic, check_off_policy_correction)
    assert [problem for check in checks for problem in check(arguments)] == []
