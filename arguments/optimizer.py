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
        None, "samples per optimizer step (default: the whole rollout batch, one step per rollout)"
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout, of as many samples each: instead of --global-batch-size"
    )
    ppo_epochs: int = flag(1, "times that optimizer steps go through each rollout batch, in the same order")
    max_tokens_per_gpu: int = flag(
        8192,
        "tokens per GPU packed into one micro-batch, which --context-parallel-size GPUs share; a longer sample gets "
        "one of its own",
    )
    logprob_chunk: int = flag(
        1024, "tokens whose fp32 logits exist at one time on a rank; log-probs are the same whatever it is"
    )
    lr: float = flag(1e-6, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: LrDecayStyle = flag("constant", "shape of the decay over --num-rollout")
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up")
    ess_lr_scaling: EssLrScaling | None = flag(
        None,
        "scale the learning rate of every optimizer step by its effective sample size, the share of its sequences that "
        "count: stale data then makes small steps (VCPO). sqrt: by its square root, as suits Adam; linear",
    )
    ess_lr_full_share: float = flag(
        1.0, "with --ess-lr-scaling: share from which on a step has the whole learning rate"
    )
    weight_decay: float = flag(0.0, "AdamW weight decay")
    adam_beta1: float = flag(0.9, "Adam beta 1")
    adam_beta2: float = flag(0.95, "Adam beta 2")
    adam_eps: float = flag(1e-8, "Adam epsilon")
    clip_grad: float = flag(1.0, "gradient norm clip; 0: off")
    grad_norm_limit: float | None = flag(
        None,
        "largest gradient norm, before clipping, of an optimizer step that is made; one that is not finite never is",
    )
    max_logprob_diff: float | None = flag(
        None,
        "an optimizer step is made only if log-probs of trainer and engines differ by at most this, in nats, where "
        "both have the same weights: the mean of |log π_trainer − log π_rollout| over tokens of samples of age 0",
    )
    bad_step_action: BadStepAction = flag(
        "stop",
        "what follows an optimizer step that these limits or a gradient that is not finite forbid, which leaves the "
        "weights as they are. stop: the run ends; skip: a warning, a metric, and training goes on with the next step",
    )
    max_bad_steps: int = flag(
        10, "with --bad-step-action skip: rollout steps in a row with an optimizer step that was not made"
    )
