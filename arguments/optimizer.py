"""Optimizer and batch of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_async.arguments.flag import flag

LrDecayStyle = Literal["constant", "linear", "cosine"]
EssLrScaling = Literal["sqrt", "linear"]
BadStepAction = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerArguments:
    """Optimizer"""

    global_batch_size: int | None = flag(
        None, "samples per optimizer step (default: the whole rollout batch, one step per rollout)", at_least=1
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout, with equally many samples each, instead of --global-batch-size", at_least=1
    )
    ppo_epochs: int = flag(1, "PPO epochs: passes over each rollout batch, in the same order", at_least=1)
    max_tokens_per_gpu: int = flag(
        8192,
        "tokens per GPU packed into one micro-batch, which --context-parallel-size GPUs share; a longer sample gets "
        "its own micro-batch",
        at_least=1,
    )
    logprob_chunk: int = flag(
        1024, "chunk size in tokens for the fp32 logits of a rank; does not affect log-probs", at_least=1
    )
    lr: float = flag(1e-6, "peak learning rate", above=0, at_most=1)
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the decay",
        needs=("lr_decay_style=linear", "lr_decay_style=cosine"),
        at_least=0,
    )
    lr_decay_style: LrDecayStyle = flag("constant", "shape of the decay over --num-rollout")
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up, at most the run's", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None,
        "the warm-up as a share of the run's optimizer steps, in place of --lr-warmup-iters",
        at_least=0,
        at_most=1,
    )
    ess_lr_scaling: EssLrScaling | None = flag(
        None,
        "scale the learning rate of every optimizer step by its effective sample size, as a share of its sequences: "
        "stale data then makes small steps (VCPO). linear: by the share; sqrt: by its square root, which suits Adam",
    )
    ess_lr_full_share: float = flag(
        1.0,
        "with --ess-lr-scaling: effective-sample-size share at which the full learning rate applies",
        needs=("ess_lr_scaling",),
        above=0,
        at_most=1,
    )
    weight_decay: float = flag(0.0, "AdamW weight decay", at_least=0)
    adam_beta1: float = flag(0.9, "Adam beta 1", at_least=0, below=1)
    adam_beta2: float = flag(0.95, "Adam beta 2", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "Adam epsilon", above=0)
    clip_grad: float = flag(1.0, "gradient norm clip; 0: off", at_least=0)
    grad_norm_limit: float | None = flag(
        None,
        "reject optimizer steps whose gradient norm before clipping exceeds this; non-finite gradients are always "
        "rejected",
        above=0,
    )
    max_logprob_diff: float | None = flag(
        None,
        "reject optimizer steps if log-probs of trainer and engines on the same weights differ by more than this, in "
        "nats: the mean of |log π_trainer − log π_rollout| over tokens of samples of age 0",
        above=0,
    )
    bad_step_action: BadStepAction = flag(
        "stop",
        "action after a rejected optimizer step, which leaves the weights unchanged. stop: end the run; skip: warn, "
        "count it in the metrics and continue with the next step",
    )
    max_bad_steps: int = flag(
        10,
        "with --bad-step-action skip: consecutive rollout steps with a rejected optimizer step that end the run",
        needs=("bad_step_action=skip",),
        at_least=1,
    )
