"""Advantages and loss. Choices that list module:attr accept your own code; its protocols are in miles_async/api/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import ModuleAttr, flag

AdvantageEstimatorName = Literal["grpo", "rloo", "opob", "reinforce", "token_rewards", "on_policy_distillation"]
TokenAdvantagesName = Literal["gae", "kl_in_reward"]
LossType = Literal["policy_loss", "sft_loss"]
PolicyLossName = Literal[
    "ppo_clip", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "sat", "sat_gspo", "dis"
]
LossAggregationName = Literal["token_mean", "sequence_mean", "sequence_sum"]
TisMode = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
RejectionStatistic = Literal["ratio", "k1", "k2", "k3"]
ProxLogpMethod = Literal["recompute", "loglinear", "snapshots"]
KlLossType = Literal["k1", "k2", "k3", "low_var_kl", "abs"]
OpdStudent = Literal["trainer", "rollout"]
RoutingReplay = Literal["rollout", "old_policy"]
"""Source of the experts in a mixture's training pass: the engines, or the pass for old log-probs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmArguments:
    """Algorithm"""

    loss_type: LossType = flag(
        "policy_loss",
        "policy_loss: reinforcement learning; sft_loss: supervised fine-tuning, the cross entropy of the answers in "
        "--prompt-data (turns of the assistant, or --label-key), by the trainer alone: no engine is started",
    )
    advantage_estimator: AdvantageEstimatorName | ModuleAttr = flag(
        "grpo",
        "advantage of a sample. grpo: (r − mean) / (std + 1e-4) within the group; rloo: r − mean of the others; "
        "opob: as grpo, but samples count in the mean by the square of importance weight × gradient norm (VCPO; costs "
        "another forward and backward pass per sample); reinforce: r; "
        "token_rewards: r and, for single tokens, what environments and rewards gave them, with "
        "--token-advantages gae; on_policy_distillation: 0, to learn from the teacher of --use-opd alone",
    )
    grpo_std_normalization: bool = flag(
        True,
        "divide by the group's standard deviation (no: Dr. GRPO)",
        needs=("advantage_estimator=grpo", "advantage_estimator=opob", "advantage_estimator=own"),
    )
    token_advantages: TokenAdvantagesName | ModuleAttr | None = flag(
        None,
        "advantages per token, computed by the trainer from the samples' (default: each token has its sample's). "
        "kl_in_reward: minus --kl-coef × KL of --kl-reward-type, summed over the token and those after it; gae: "
        "generalized advantage estimation with a critic, trained alongside the policy (PPO)",
    )
    gamma: float = flag(
        1.0,
        "discount of rewards per token, with --token-advantages gae",
        needs=("token_advantages=gae",),
        at_least=0,
        at_most=1,
    )
    lambd: float = flag(
        1.0,
        "λ of --token-advantages gae: 1 is the return minus the value, 0 trusts the next token's value alone",
        needs=("token_advantages=gae",),
        at_least=0,
        at_most=1,
    )
    lambd_length_alpha: float | None = flag(
        None,
        "length-dependent λ instead of --lambd: 1 − 1 / (this × n), at least 0, for a sequence with n tokens that "
        "carry loss (VAPO, SAO)",
        needs=("token_advantages=gae",),
        above=0,
    )
    critic_lambd: float | None = flag(
        None,
        "λ of the returns that the critic learns, if it differs from the policy's; 1: the rewards to go (VAPO, SAO)",
        needs=("token_advantages=gae",),
        at_least=0,
        at_most=1,
    )
    kl_coef: float = flag(
        0.0,
        "weight of the KL in the reward, with --token-advantages kl_in_reward or gae",
        needs=("token_advantages=kl_in_reward", "token_advantages=gae", "token_advantages=own"),
        at_least=0,
    )
    kl_reward_type: KlLossType | ModuleAttr = flag(
        "k1", "estimator of the KL in the reward, as in --kl-loss-type; only k1 yields the exact KL gradient"
    )
    normalize_advantages: bool = flag(
        False, "whiten: advantages get mean 0 and variance 1 over the tokens of the rollout batch (REINFORCE++)"
    )
    overlong_buffer_len: int | None = flag(
        None,
        "number of tokens before --rollout-max-response-len over which the reward that advantages are computed from "
        "falls linearly, by --overlong-penalty-factor in total (DAPO's soft overlong punishment)",
        at_least=1,
    )
    overlong_penalty_factor: float = flag(
        1.0, "largest penalty of --overlong-buffer-len", needs=("overlong_buffer_len",), above=0
    )
    use_opd: bool = flag(
        False,
        "on-policy distillation: subtract --opd-kl-coef × (log π − log π_teacher) from the advantage of each token; "
        "the teacher is a frozen group of --server-groups",
    )
    opd_teacher: str | None = flag(
        None,
        "name of the frozen group that is the teacher of --use-opd (default: the only one)",
        metavar="GROUP",
        needs=("use_opd",),
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL of --use-opd, per nat", needs=("use_opd",), at_least=0)
    opd_student: OpdStudent = flag(
        "trainer",
        "whose log-probs --use-opd compares with the teacher's. trainer: the policy's at the optimizer step, "
        "whatever the sample's age (AsyncOPD); rollout: the engine's when it sampled the tokens",
        needs=("use_opd",),
    )
    policy_loss: PolicyLossName | ModuleAttr = flag(
        "ppo_clip",
        "loss of a token (docs/algorithms.md). ppo_clip: PPO's clipped surrogate; gspo: that with one ratio per "
        "sequence; cispo: REINFORCE, weighted by the clipped ratio; sapo: a sigmoid of the ratio; gmpo: the geometric "
        "mean of a sequence's clipped ratios; dppo_tv, dppo_kl: no gradient for tokens whose probability moved further "
        "than --eps-clip by total variation, or by KL; clip_cov drops, and kl_cov penalizes by KL, tokens with a high "
        "covariance of log-prob and advantage; sat, sat_gspo: ppo_clip and gspo with a tighter clip for stale tokens "
        "or sequences; dis: cispo without the tokens outside of the clip",
    )
    eps_clip: float = flag(
        0.2, "PPO clip range below 1 (1e9: no clip); of the log-ratio with gmpo, of the divergence with dppo", above=0
    )
    eps_clip_high: float | None = flag(
        None, "PPO clip range above 1 (default: --eps-clip); 0.28 is DAPO's clip-higher", above=0
    )
    eps_clip_c: float | None = flag(
        3.0,
        "dual clip: cap the loss of tokens with a negative advantage A at this × |A|, since PPO's clip does not bound "
        "it there; more than 1; none: no cap",
        above=1,
    )
    sat_quantile: float = flag(
        0.9,
        "sat tightens the clip for tokens of the rollout batch whose |log π − log π_rollout| exceeds this quantile",
        above=0,
        at_most=1,
    )
    tau_pos: float = flag(1.0, "steepness of sapo's sigmoid for positive advantages", above=0)
    tau_neg: float = flag(1.05, "steepness of sapo's sigmoid for other advantages", above=0)
    clip_cov_ratio: float = flag(2e-4, "share of the rollout batch's tokens that clip_cov drops", above=0, at_most=1)
    clip_cov_lb: float = flag(1.0, "lower bound on the covariance of the tokens that clip_cov samples", at_least=0)
    clip_cov_ub: float = flag(5.0, "upper bound on the covariance of the tokens that clip_cov samples", above=0)
    kl_cov_ratio: float = flag(2e-4, "share of the rollout batch's tokens that kl_cov penalizes", above=0, at_most=1)
    ppo_kl_coef: float = flag(1.0, "weight of kl_cov's penalty, per nat", at_least=0)
    loss_aggregation: LossAggregationName | ModuleAttr = flag(
        "token_mean",
        "the loss of an optimizer step is the mean over its tokens that carry loss (token_mean), over sequences of "
        "the mean over their tokens (sequence_mean), or of their sum divided by --loss-length-normalizer "
        "(sequence_sum, Dr. GRPO's)",
    )
    loss_length_normalizer: int | None = flag(
        None,
        "tokens that a sequence's sum is divided by, with --loss-aggregation sequence_sum; the longest response",
        needs=("loss_aggregation=sequence_sum",),
        at_least=1,
    )
    use_rollout_logprobs: bool = flag(
        False,
        "PPO ratio against the engines' log-probs: clips around the policy that sampled; corrects for staleness",
    )
    prox_logp_method: ProxLogpMethod = flag(
        "recompute",
        "the trainer's policy that ratios compare with, without --use-rollout-logprobs. recompute: a forward pass "
        "before the first of several optimizer steps; loglinear: none, interpolated by the age of each token from the "
        "policy that sampled it and the one that is trained (A-3PO); snapshots: the trainer's weights of the version "
        "that sampled the token, kept in host memory for --max-weight-staleness versions, and a forward pass for each "
        "version that a batch has. Both with --use-tis",
    )
    use_tis: bool = flag(False, "importance sampling: weight each token to correct for sampling by older weights")
    tis_mode: TisMode | ModuleAttr = flag(
        "truncate",
        "the weight of --use-tis, from w = π_trainer / π_rollout. truncate: w within --tis-clip-low and --tis-clip; "
        "mask: w, but 0 outside of them (IcePop)",
        needs=("use_tis",),
    )
    tis_level: CorrectionLevel = flag(
        "token",
        "w of --use-tis: of each token, its product over a sequence, or its geometric mean over a sequence",
        needs=("use_tis",),
    )
    tis_clip: float = flag(2.0, "largest importance weight", needs=("use_tis",), above=0)
    tis_clip_low: float = flag(0.0, "smallest importance weight", needs=("use_tis",), at_least=0)
    use_rs: bool = flag(
        False, "rejection: tokens or sequences where trainer and engine differ too much do not move the policy"
    )
    rs_statistic: RejectionStatistic = flag(
        "ratio",
        "what --use-rs looks at, with d = log π − log π_rollout. ratio: exp(d); k1: −d; k2: d² / 2; k3: exp(d) − 1 − d",
        needs=("use_rs",),
    )
    rs_level: CorrectionLevel = flag(
        "token",
        "--use-rs rejects tokens by their own statistic, or sequences by its sum or its mean (geometric)",
        needs=("use_rs",),
    )
    rs_lower_bound: float | None = flag(None, "smallest statistic that --use-rs accepts", needs=("use_rs",))
    rs_upper_bound: float | None = flag(None, "largest statistic that --use-rs accepts", needs=("use_rs",))
    rs_veto_threshold: float | None = flag(
        None, "--use-rs rejects a sequence in which any token's ratio is less than this", needs=("use_rs",), above=0
    )
    use_opsm: bool = flag(
        False,
        "off-policy sequence masking: sequences with a negative advantage do not move the policy where the mean of "
        "log π_rollout − log π over their tokens is more than --opsm-delta",
    )
    opsm_delta: float = flag(1e-4, "threshold of --use-opsm, in nats per token", needs=("use_opsm",), at_least=0)
    m2_threshold: float | None = flag(
        None,
        "M2PO: the tokens of the rollout batch whose (log π_trainer − log π_rollout)² is largest do not move the "
        "policy, until the mean of the rest is below this; with --use-tis",
        above=0,
    )
    max_token_age: int | None = flag(
        None,
        "mask tokens older than this many versions in the policy loss; other tokens of the sample still train",
        at_least=0,
    )
    token_age_decay: float = flag(
        1.0, "weight of a token in the policy loss: this to the power of its age", above=0, at_most=1
    )
    use_kl_loss: bool = flag(False, "add --kl-loss-coef × KL(π ‖ reference) to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss", needs=("use_kl_loss",), at_least=0)
    kl_loss_type: KlLossType | ModuleAttr = flag(
        "k3",
        "estimator of the KL loss. k3: exp(d) − 1 − d with d = log π_ref − log π; low_var_kl: that, at most 10; k2: "
        "d² / 2; abs: |d|; k1: −d, whose gradient is 0 on average",
        needs=("use_kl_loss",),
    )
    kl_target: float | None = flag(
        None,
        "mean KL to the reference model, in nats per token, that --kl-loss-coef or --kl-coef is adapted to after each "
        "rollout step (default: they are constant)",
        above=0,
    )
    kl_horizon: int = flag(
        10_000,
        "with --kl-target: number of sequences in which the coefficient may change by about 20 %",
        needs=("kl_target",),
        at_least=1,
    )
    ref_update_interval: int | None = flag(
        None, "rollout steps after which the reference model follows the policy (default: never)", at_least=1
    )
    ref_update_alpha: float = flag(
        1.0,
        "share of the policy's weights in each update of the reference model; 1: a copy; less: a moving average",
        needs=("ref_update_interval",),
        above=0,
        at_most=1,
    )
    ref_hf_checkpoint: Path | None = flag(
        None, "reference model of the KL loss and the KL in the reward (default: --hf-checkpoint)"
    )
    use_rollout_routing_replay: bool = flag(
        False, "mixtures: the trainer routes each token to the experts that the engine chose"
    )
    use_routing_replay: bool = flag(
        False,
        "mixtures: optimizer steps route each token to the experts that the old-log-prob pass chose (covered by "
        "--use-rollout-routing-replay)",
    )
    entropy_coef: float = flag(
        0.0,
        "weight of the entropy bonus: this × the mean entropy of tokens, in nats, is subtracted from the loss",
        at_least=0,
    )
    entropy_coef_end: float | None = flag(
        None, "weight of the entropy bonus at the end of the run, reached linearly (default: constant)", at_least=0
    )
    log_entropy: bool = flag(False, "compute the policy's entropy, a pass over all logits, and log it as train/entropy")
    allow_uncorrected_off_policy: bool = flag(
        False,
        "train asynchronously with neither --use-rollout-logprobs nor --use-tis (learns worse with every "
        "version of age)",
    )

    @property
    def has_kl_in_reward(self) -> bool:
        """True if the reward of a token is less by its KL to the reference model."""
        return self.token_advantages == "kl_in_reward" or (self.token_advantages == "gae" and self.kl_coef > 0)

    @property
    def supervised(self) -> bool:
        """True if the run learns from given answers: nothing is sampled."""
        return self.loss_type == "sft_loss"

    @property
    def weighs_ages(self) -> bool:
        """True if tokens count by their age."""
        return self.max_token_age is not None or self.token_age_decay != 1

    @property
    def routing_replay(self) -> RoutingReplay | None:
        """Replayed choices of experts; None: the trainer's routers choose."""
        if self.use_rollout_routing_replay:
            return "rollout"
        return "old_policy" if self.use_routing_replay else None

    @property
    def heeds_rollout_logprobs(self) -> bool:
        """True if the loss uses the probability with which a token was sampled."""
        return self.use_rollout_logprobs or self.use_tis
