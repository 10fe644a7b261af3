"""Advantages and loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

AdvantageEstimator = Literal["grpo", "rloo", "reinforce"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmArguments:
    """Algorithm"""

    advantage_estimator: AdvantageEstimator = flag(
        "grpo",
        "grpo: (r − mean) / (std + 1e-4) within the group; rloo: r − mean of the others; reinforce: r",
    )
    grpo_std_normalization: bool = flag(True, "divide by the group's standard deviation (no: Dr. GRPO)")
    eps_clip: float = flag(0.2, "PPO clip range below 1")
    eps_clip_high: float | None = flag(None, "PPO clip range above 1 (default: --eps-clip); 0.28 is DAPO's clip-higher")
    eps_clip_c: float | None = flag(
        3.0,
        "dual clip: the loss of a token with a negative advantage A is at most this × |A|, however large its ratio, "
        "which PPO's clip does not bound there; more than 1; none: no bound",
    )
    use_rollout_logprobs: bool = flag(
        False,
        "PPO ratio against the engines' log-probs: clips around the policy that sampled; corrects for staleness",
    )
    use_tis: bool = flag(
        False, "truncated importance sampling: weight each token by min(π_trainer / π_rollout, --tis-clip)"
    )
    tis_clip: float = flag(2.0, "cap of the truncated importance weight")
    use_kl_loss: bool = flag(False, "add --kl-loss-coef × KL(π ‖ reference), estimator k3")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss")
    ref_hf_checkpoint: Path | None = flag(None, "reference model of the KL loss (default: --hf-checkpoint)")
    log_entropy: bool = flag(False, "compute the policy's entropy, a pass over all logits, and log it as train/entropy")
    allow_uncorrected_off_policy: bool = flag(
        False,
        "train asynchronously with neither --use-rollout-logprobs nor --use-tis (learns worse with every "
        "version of age)",
    )

    @property
    def heeds_rollout_logprobs(self) -> bool:
        """Whether the loss knows with which probability a token was sampled."""
        return self.use_rollout_logprobs or self.use_tis
