"""Checks of the algorithm's flags together, and with how old the data may be (C12)."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.algorithm import AlgorithmArguments, PolicyLossName
from miles_async.arguments.model import ModelArguments, num_experts
from miles_async.arguments.model_files import read_config
from miles_async.arguments.problems import given
from miles_async.arguments.specification import flag_specifications, group_flags

AGAINST_SAMPLER: frozenset[PolicyLossName] = frozenset({"sat", "sat_gspo", "dis"})
"""Losses whose ratio is against the policy that sampled; against another they see no staleness."""

CLIPPED: frozenset[PolicyLossName] = AGAINST_SAMPLER | frozenset(
    {"ppo_clip", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov"}
)
LOSSES_WITH: dict[str, frozenset[PolicyLossName]] = {
    "eps_clip": CLIPPED,
    "eps_clip_high": CLIPPED,
    "eps_clip_c": CLIPPED - {"cispo", "gmpo", "dis"},
    "sat_quantile": frozenset({"sat", "sat_gspo"}),
    "tau_pos": frozenset({"sapo"}),
    "tau_neg": frozenset({"sapo"}),
    "clip_cov_ratio": frozenset({"clip_cov"}),
    "clip_cov_lb": frozenset({"clip_cov"}),
    "clip_cov_ub": frozenset({"clip_cov"}),
    "kl_cov_ratio": frozenset({"kl_cov"}),
    "ppo_kl_coef": frozenset({"kl_cov"}),
}
"""Field → the losses that read it."""

CLIPPED_RATIO = CLIPPED - {"gmpo", "dppo_tv", "dppo_kl"}
"""Losses that clip the ratio itself, which is never below 0."""

NO_CLIP = 1e6
"""A clip range from here on is meant as none."""


def check_algorithm(arguments: Arguments) -> Iterator[str]:
    """Check that the advantage has a baseline, and that options suit each other."""
    yield from _check_advantages(arguments)
    yield from _check_loss(arguments)
    yield from _check_reference(arguments)
    yield from _check_corrections(arguments.algorithm)


def _check_advantages(arguments: Arguments) -> Iterator[str]:
    """Check that samples have something to be compared with, and rewards reach the tokens that earned them."""
    algorithm, samples = arguments.algorithm, arguments.rollout.n_samples_per_prompt
    compares = algorithm.advantage_estimator in ("grpo", "rloo", "opob")
    if samples == 1 and compares:
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {algorithm.advantage_estimator}: a group of one has "
            "nothing to compare with, every advantage is 0; use at least 2, or --advantage-estimator reinforce"
        )
    elif samples > 1 and compares and arguments.staleness.min_samples(samples) == 1:
        yield (
            f"--min-group-fraction {arguments.staleness.min_group_fraction:g} of --n-samples-per-prompt {samples} may "
            f"leave a group of one, which has nothing to compare with: raise it to at least {2 / samples:g}"
        )
    if algorithm.advantage_estimator == "token_rewards" and algorithm.token_advantages != "gae":
        yield (
            "--advantage-estimator token_rewards gives each token what it earned itself, and no credit for what came "
            "after it: add --token-advantages gae, or use --advantage-estimator reinforce"
        )
    longest, buffer = arguments.rollout.rollout_max_response_len, algorithm.overlong_buffer_len
    if buffer is not None and buffer > longest:
        yield f"--overlong-buffer-len {buffer} is more than --rollout-max-response-len {longest}"
    if algorithm.advantage_estimator == "opob":
        yield from _check_optimal_baseline(arguments)


def _check_loss(arguments: Arguments) -> Iterator[str]:
    """Check that the policy's loss has what it needs, and no option of another one."""
    algorithm = arguments.algorithm
    for name, losses in LOSSES_WITH.items():
        flag, value = flag_specifications()[name], getattr(algorithm, name)
        if value != flag.default and ":" not in algorithm.policy_loss and algorithm.policy_loss not in losses:
            yield f"{flag.flag} {value} has no effect with --policy-loss {algorithm.policy_loss}"
    wide, high = 1 < algorithm.eps_clip < NO_CLIP, algorithm.eps_clip_high
    if wide and high is None and algorithm.policy_loss in CLIPPED_RATIO:
        yield (
            f"--eps-clip {algorithm.eps_clip:g} without --eps-clip-high clips ratios to {1 - algorithm.eps_clip:g} ... "
            f"{1 + algorithm.eps_clip:g}, and none is below 0: expected at most 1, a separate upper end "
            "(--eps-clip-high), or 1e9 for no clip"
        )
    if algorithm.clip_cov_lb >= algorithm.clip_cov_ub:
        yield f"--clip-cov-lb {algorithm.clip_cov_lb} is not less than --clip-cov-ub {algorithm.clip_cov_ub}"
    if algorithm.policy_loss in AGAINST_SAMPLER and not algorithm.use_rollout_logprobs:
        yield (
            f"--policy-loss {algorithm.policy_loss} compares with the policy that sampled, however stale: add "
            "--use-rollout-logprobs, and leave --use-tis out"
        )
    if algorithm.policy_loss in ("clip_cov", "kl_cov") and algorithm.prox_logp_method == "loglinear":
        yield (
            f"--policy-loss {algorithm.policy_loss} chooses tokens before the first optimizer step, by log-probs that "
            "--prox-logp-method loglinear only knows at each step: use recompute"
        )
    if algorithm.loss_aggregation == "sequence_sum" and algorithm.loss_length_normalizer is None:
        yield (
            "--loss-aggregation sequence_sum divides by --loss-length-normalizer: give it, such as "
            f"{arguments.rollout.rollout_max_response_len}, which is --rollout-max-response-len"
        )
    end = algorithm.entropy_coef_end
    if end is not None and end == algorithm.entropy_coef:
        yield f"--entropy-coef-end {end} is --entropy-coef: leave it out, or give another end"


def _check_optimal_baseline(arguments: Arguments) -> Iterator[str]:
    """Check that no other flag removes opob's baseline, and that one model replica holds each sample's gradient."""
    algorithm, model, flag = arguments.algorithm, arguments.model, "--advantage-estimator opob"
    if algorithm.token_advantages is not None:
        yield (
            f"{flag} with --token-advantages {algorithm.token_advantages}: the baseline assumes one reward per "
            "sample; leave one of them out"
        )
    if algorithm.normalize_advantages:
        yield f"{flag} with --normalize-advantages, which takes another mean away: leave one of them out"
    if (ranks := model.expert_model_parallel_size) > 1:
        yield (
            f"{flag} with --expert-model-parallel-size {ranks}: gradients of experts come from the samples of several "
            "data-parallel ranks, and each sample's own is needed; use 1, or --advantage-estimator grpo"
        )
    if (tensor := model.tensor_model_parallel_size) != model.expert_tensor_size and _has_experts(model):
        yield (
            f"{flag} with --expert-tensor-parallel-size {model.expert_tensor_size}: gradients of experts are added up "
            f"over other ranks than the rest of a sample's; use {tensor}, which is --tensor-model-parallel-size"
        )


def _has_experts(model: ModelArguments) -> bool:
    """False for a dense model, whose recipes give an expert parallelism as well."""
    return model.hf_checkpoint is None or num_experts(read_config(model.hf_checkpoint)) > 0


def _check_reference(arguments: Arguments) -> Iterator[str]:
    """Check that a KL to the reference has a coefficient, and that a reference which is given has a use."""
    algorithm = arguments.algorithm
    in_reward = algorithm.token_advantages == "kl_in_reward"
    own = any(":" in (name or "") for name in (algorithm.policy_loss, algorithm.tis_mode, algorithm.token_advantages))
    compared = algorithm.use_kl_loss or algorithm.has_kl_in_reward or own  # hooks may compare with the reference
    if in_reward and algorithm.kl_coef == 0:
        yield "--token-advantages kl_in_reward with --kl-coef 0 has no effect: set the coefficient, or remove both"
    if algorithm.kl_reward_type != "k1" and not algorithm.has_kl_in_reward:
        yield f"--kl-reward-type {algorithm.kl_reward_type} has no effect without a --kl-coef in the reward"
    if ":" in algorithm.kl_loss_type and not algorithm.use_kl_loss:
        yield f"--kl-loss-type {algorithm.kl_loss_type} has no effect without --use-kl-loss"
    if algorithm.ref_hf_checkpoint and not compared:
        yield "--ref-hf-checkpoint has no effect without --use-kl-loss or a --kl-coef in the reward"
    if algorithm.kl_target is not None:
        flag = f"--kl-target {algorithm.kl_target}"
        coefficient = "--kl-coef" if in_reward else "--kl-loss-coef"
        if not (algorithm.use_kl_loss or in_reward):
            yield f"{flag} has no effect without --use-kl-loss or --token-advantages kl_in_reward"
        elif algorithm.use_kl_loss and in_reward:
            yield f"{flag} adapts one coefficient: use --use-kl-loss or --token-advantages kl_in_reward, not both"
        elif not (algorithm.kl_coef if in_reward else algorithm.kl_loss_coef):
            yield f"{flag} multiplies {coefficient}, which is 0 and would stay so: give it a value to begin with"
        sequences = arguments.rollout.rollout_batch_size * arguments.rollout.n_samples_per_prompt
        if 5 * algorithm.kl_horizon <= sequences:  # a step changes it by up to 0.2 · sequences / horizon of its value
            yield (
                f"--kl-horizon {algorithm.kl_horizon}: expected more than a fifth of the {sequences} sequences of a "
                f"rollout step; a KL below {flag} would make {coefficient} 0 or negative"
            )
    if algorithm.ref_update_interval is None:
        return
    flag = f"--ref-update-interval {algorithm.ref_update_interval}"
    if not compared:
        yield f"{flag} has no effect without --use-kl-loss or a --kl-coef in the reward: nothing asks a reference"
    if arguments.model.lora_rank:
        yield f"{flag} with --lora-rank: the reference is the model without them, which stays as it is; leave one out"


def _check_corrections(algorithm: AlgorithmArguments) -> Iterator[str]:
    """Check the flags of corrections for off-policy samples."""
    if algorithm.m2_threshold is not None and not (
        algorithm.use_tis and not algorithm.use_rollout_logprobs and algorithm.prox_logp_method == "recompute"
    ):
        yield (
            "--m2-threshold compares the trainer's log-probs with the engines', and needs the weight that corrects for "
            "the rest: use --use-tis, with neither --use-rollout-logprobs nor another --prox-logp-method"
        )
    if algorithm.tis_clip_low > algorithm.tis_clip:
        yield f"--tis-clip-low {algorithm.tis_clip_low} is more than --tis-clip {algorithm.tis_clip}"
    low, high = algorithm.rs_lower_bound, algorithm.rs_upper_bound
    if algorithm.use_rs and low is high is algorithm.rs_veto_threshold is None:
        yield "--use-rs rejects nothing: give --rs-lower-bound, --rs-upper-bound or --rs-veto-threshold"
    elif algorithm.use_rs and low is high is None:
        for name in ("rs_statistic", "rs_level"):
            flag, value = flag_specifications()[name], getattr(algorithm, name)
            if value != flag.default:
                yield f"{flag.flag} {value} has no effect without --rs-lower-bound or --rs-upper-bound"
    if low is not None and high is not None and low > high:
        yield f"--rs-lower-bound {low} is more than --rs-upper-bound {high}"
    method = algorithm.prox_logp_method
    if method != "recompute" and algorithm.use_rollout_logprobs:
        yield (
            f"--prox-logp-method {method} with --use-rollout-logprobs: ratios compare with the engines' policy, "
            "whatever the trainer's was; use --use-tis instead of the latter"
        )
    elif method != "recompute" and not algorithm.use_tis:
        yield f"--prox-logp-method {method} needs the weight of decoupled PPO: add --use-tis"


def check_off_policy_correction(arguments: Arguments) -> Iterator[str]:
    """Check that asynchronous training has an off-policy correction unless flags waive it (C12)."""
    algorithm, staleness, weights = arguments.algorithm, arguments.staleness, arguments.weights
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        yield (
            "--use-tis with --use-rollout-logprobs corrects twice: the ratio against the engines' log-probs already "
            "weighs by π_trainer / π_rollout; use one of them"
        )
    if algorithm.prox_logp_method == "snapshots" and staleness.bound is None:
        yield (
            "--prox-logp-method snapshots keeps the weights of --max-weight-staleness versions, and there is no "
            "bound: give one"
        )
    reasons = {
        f"--max-rollout-lead {staleness.lead}": staleness.lead > 1,
        f"--update-weights-interval {weights.update_weights_interval}": weights.update_weights_interval > 1,
        f"--debug-publication-lag {weights.debug_publication_lag}": weights.debug_publication_lag > 0,
    }
    asynchronous = given(reasons)
    if asynchronous and not algorithm.heeds_rollout_logprobs and not algorithm.allow_uncorrected_off_policy:
        yield (
            f"asynchronous training ({', '.join(asynchronous)}) without an off-policy correction learns worse with "
            "every version of age: add --use-rollout-logprobs or --use-tis (or --on-policy; or, if it is intended, "
            "--allow-uncorrected-off-policy)"
        )


def check_critic(arguments: Arguments) -> Iterator[str]:
    """Check that the critic can learn under the other flags."""
    algorithm = arguments.algorithm
    if algorithm.lambd_length_alpha is not None and algorithm.lambd != 1.0:
        yield (
            f"--lambd {algorithm.lambd} with --lambd-length-alpha {algorithm.lambd_length_alpha}, which takes its "
            "place: leave one of them out"
        )
    if algorithm.token_advantages != "gae":
        return
    if algorithm.advantage_estimator in ("grpo", "rloo", "on_policy_distillation"):
        yield (
            f"--token-advantages gae with --advantage-estimator {algorithm.advantage_estimator}: the critic is the "
            "baseline of rewards, of which nothing or only the difference from a group's mean is left; use "
            "--advantage-estimator reinforce"
        )
    yield from check_trained_critic(arguments)


def check_trained_critic(arguments: Arguments) -> Iterator[str]:
    """Check a run with a critic. Your own ``--token-advantages`` need one if their ``needs`` say so, which their code
    tells (``runs.checks.check_hooks``).
    """
    alone = arguments.critic.num_critic_only_steps
    if arguments.model.lora_rank:
        yield (
            f"--lora-rank {arguments.model.lora_rank} with --token-advantages {arguments.algorithm.token_advantages}: "
            "a critic is trained whole, which takes the memory that adapters save; leave one of them out"
        )
    if alone >= arguments.rollout.num_rollout and arguments.rollout.num_epoch is None:
        yield (
            f"--num-critic-only-steps {alone} leaves none of --num-rollout "
            f"{arguments.rollout.num_rollout} for the policy: lower it, or raise --num-rollout"
        )
    directory = arguments.model.hf_checkpoint
    if directory is not None and "vision_config" in read_config(directory):
        yield (
            f"--token-advantages {arguments.algorithm.token_advantages}: its critic reads no images, and "
            f"--hf-checkpoint {directory} does; leave it out"
        )


def check_absent_critic(arguments: Arguments) -> Iterator[str]:
    """Check a run whose own ``--token-advantages`` need no critic for flags of one."""
    for flag in group_flags("critic"):
        if flag.value_in(arguments) != flag.default:
            yield (
                f"{flag.flag} has no effect with --token-advantages {arguments.algorithm.token_advantages}, whose "
                "needs do not name values, which a critic gives: leave it out"
            )
