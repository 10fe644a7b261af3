"""The quick start in all its variants, each long enough to see it learn: a quarter of an hour on 2 cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.real_run import real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12
VARIANTS = {
    "on-policy": ("--on-policy",),
    "abort": ("--pause-generation-mode", "abort"),
    "retract": ("--pause-generation-mode", "retract"),
    "in-place": ("--pause-generation-mode", "in_place"),
    "one engine, DP1": ("--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "publish every second step": ("--update-weights-interval", "2"),
    "two optimizer steps, TIS": ("--global-batch-size", "64", "--no-use-rollout-logprobs", "--use-tis"),
    "KL loss": ("--use-kl-loss", "--kl-loss-coef", "0.01"),
    "PPO with a critic": ("@preset:ppo", "--critic-lr", "1e-3", "--num-critic-only-steps", "2"),
    "REINFORCE++": ("@preset:reinforce-plus-plus",),
    "GSPO": ("@preset:gspo",),
    "CISPO": ("@preset:cispo",),
    "VCPO": ("@preset:vcpo", "--no-use-rollout-logprobs"),
    "unbounded": ("--max-weight-staleness", "none", "--max-rollout-lead", "none"),
    "rolling": ("--publish-order", "rolling"),
    "object store": ("--weight-transport", "object_store"),
    "disk, xor": ("--weight-transport", "disk", "--weight-delta", "xor", "--verify-weights", "full"),
    "extra samples": ("--extra-samples-per-prompt", "2"),
    "LoRA, TP2": ("--lora-rank", "8", "--lora-alpha", "32", "--lr", "3e-3", "--tensor-model-parallel-size", "2"),
    "DoRA, KL loss": (
        *("--lora-rank", "8", "--lora-alpha", "32", "--lr", "3e-3", "--lora-type", "dora"),
        *("--use-kl-loss", "--kl-loss-coef", "0.01"),
    ),
    "drop": ("--stale-group-action", "drop", "--max-weight-staleness", "1"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_learns(name: str, tmp_path: Path) -> None:
    flags = ("--num-rollout", str(STEPS), "--eval-interval", "none", *VARIANTS[name])
    with real_run(tmp_path / "run", *flags) as run:
        assert run.wait(400) == 0, run.output
        run.assert_nothing_left()
    summary = run.summary
    assert summary["steps"] == STEPS
    assert summary["reward_last"] > 0.4 > summary["reward_first"]
    assert summary["eval_reward_last"] > 0.8
    assert summary["balanced"]
    assert summary["groups"]["trained"] == STEPS * 16
    assert (summary["logprob_diff"]["max"] or 0.0) < 1e-4
