"""What flags mean together: every combination that cannot work is refused before anything starts (C3, C12).

All problems are reported at once, each naming the flags and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from arguments import Arguments
from arguments.problems import refuse
from arguments.ranges import range_problems
from arguments.surroundings import (
    check_model,
    check_model_fits,
    check_outputs,
    check_prompt_files,
    check_router_port,
)

Check = Callable[[Arguments], Iterator[str]]


def validate(arguments: Arguments) -> None:
    """Raises ConfigurationError listing every problem found. Imports nothing heavy, starts nothing."""
    problems = list(range_problems(arguments))
    checks = CHECKS if problems else (*CHECKS, *DIVIDING_CHECKS)
    problems += [problem for check in checks for problem in check(arguments)]
    refuse(problems)


def check_ranks(arguments: Arguments) -> Iterator[str]:
    """Ranks divide into model replicas, GPUs into engines."""
    model, cluster = arguments.model, arguments.cluster
    replica = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if cluster.trainer_world_size % replica:
        yield (
            f"{cluster.trainer_world_size} trainer ranks (--actor-num-nodes {cluster.actor_num_nodes} × "
            f"--actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}) do not divide into replicas of "
            f"{replica} "
            f"(--tensor-model-parallel-size {model.tensor_model_parallel_size} × "
            f"--pipeline-model-parallel-size {model.pipeline_model_parallel_size}): change one of them"
        )
    if cluster.rollout_num_gpus % cluster.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {cluster.rollout_num_gpus} is not a multiple of "
            f"--rollout-num-gpus-per-engine {cluster.rollout_num_gpus_per_engine}"
        )


def check_batches(arguments: Arguments) -> Iterator[str]:
    """Rollout batches divide into optimizer steps, these over ranks, and samples fit micro-batches."""
    rollout, optimizer = arguments.rollout, arguments.optimizer
    samples, batch = rollout.samples_per_rollout, arguments.global_batch_size
    if samples % batch:
        yield (
            f"--rollout-batch-size {rollout.rollout_batch_size} × --n-samples-per-prompt "
            f"{rollout.n_samples_per_prompt} "
            f"= {samples} samples do not divide into optimizer steps of --global-batch-size {batch}"
        )
    if batch < arguments.data_parallel_size:
        yield (
            f"{batch} samples per optimizer step cannot be split over {arguments.data_parallel_size} "
            "data-parallel ranks: "
            "raise --global-batch-size (or --rollout-batch-size), or train with fewer ranks "
            "(--actor-num-gpus-per-node)"
        )
    prompt = arguments.data.rollout_max_prompt_len
    longest = rollout.rollout_max_response_len + (prompt or 1)
    if optimizer.max_tokens_per_gpu < longest:
        known = f"--rollout-max-prompt-len {prompt} + " if prompt else "a prompt and "
        yield (
            f"--max-tokens-per-gpu {optimizer.max_tokens_per_gpu} cannot hold the longest sample: {known}"
            f"--rollout-max-response-len {rollout.rollout_max_response_len}: raise it to at least {longest}"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is larger than --lr {optimizer.lr}"


def check_algorithm(arguments: Arguments) -> Iterator[str]:
    """The advantage has something to compare with, and switches are not given without what they switch."""
    algorithm, samples = arguments.algorithm, arguments.rollout.n_samples_per_prompt
    if samples == 1 and algorithm.advantage_estimator in ("grpo", "rloo"):
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {algorithm.advantage_estimator}: a group "
            "of one has "
            "nothing to compare with, every advantage is 0; use at least 2, or --advantage-estimator "
            "reinforce"
        )
    elif arguments.staleness.min_samples(samples) == 1 and algorithm.advantage_estimator in ("grpo", "rloo"):
        yield (
            f"--min-group-fraction {arguments.staleness.min_group_fraction:g} of --n-samples-per-prompt {samples} may "
            f"leave a group of one, which has nothing to compare with: raise it to at least {2 / samples:g}"
        )
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield "--use-kl-loss with --kl-loss-coef 0 has no effect: set the coefficient, or remove both"
    if not algorithm.use_kl_loss and algorithm.kl_loss_coef > 0:
        yield f"--kl-loss-coef {algorithm.kl_loss_coef} has no effect without --use-kl-loss"
    if algorithm.ref_hf_checkpoint is not None and not algorithm.use_kl_loss:
        yield "--ref-hf-checkpoint has no effect without --use-kl-loss"


def check_staleness(arguments: Arguments) -> Iterator[str]:
    """The two knobs agree, and no combination of them waits for what can never come (C3, C4)."""
    staleness, weights = arguments.staleness, arguments.weights
    bound, asked_lead = staleness.max_weight_staleness, staleness.max_rollout_lead
    if staleness.on_policy:  # age 0 and lead 1 keep within any --max-weight-staleness and --max-rollout-lead
        contradictions = {
            f"--update-weights-interval {weights.update_weights_interval}": weights.update_weights_interval != 1,
            f"--debug-publication-lag {weights.debug_publication_lag}": weights.debug_publication_lag != 0,
        }
        for flag, contradicts in contradictions.items():
            if contradicts:
                yield f"--on-policy alternates strictly with the current weights, which {flag} contradicts"
        return
    if bound is None or bound < 0:  # the latter is reported already
        return
    if asked_lead is not None and asked_lead > bound + 1:
        yield (
            f"--max-rollout-lead {asked_lead} is more than --max-weight-staleness {bound} + 1: what is "
            "admitted further "
            f"ahead would be too old when it is trained; lower the lead to {bound + 1} or raise the bound"
        )
    if weights.debug_publication_lag > bound:
        yield (
            f"--debug-publication-lag {weights.debug_publication_lag} makes every sample older than "
            f"--max-weight-staleness {bound}: nothing could ever be trained; raise the bound, or use none"
        )


def check_off_policy_correction(arguments: Arguments) -> Iterator[str]:
    """Asynchronous training knows what sampled its data, or is told that this is intended (C12)."""
    algorithm, staleness, weights = arguments.algorithm, arguments.staleness, arguments.weights
    if algorithm.use_tis and algorithm.use_rollout_logprobs:
        yield (
            "--use-tis with --use-rollout-logprobs corrects twice: the ratio against the engines' "
            "log-probs already "
            "weighs by π_trainer / π_rollout; use one of them"
        )
    reasons = {
        f"--max-rollout-lead {staleness.lead}": staleness.lead > 1,
        f"--update-weights-interval {weights.update_weights_interval}": weights.update_weights_interval > 1,
        f"--debug-publication-lag {weights.debug_publication_lag}": weights.debug_publication_lag > 0,
    }
    asynchronous = [flag for flag, holds in reasons.items() if holds]
    corrected = algorithm.use_tis or algorithm.use_rollout_logprobs
    if asynchronous and not corrected and not algorithm.allow_uncorrected_off_policy:
        yield (
            f"asynchronous training ({', '.join(asynchronous)}) without an off-policy correction learns "
            "worse with every "
            "version of age: add --use-rollout-logprobs or --use-tis (or --on-policy; or, if it is intended, "
            "--allow-uncorrected-off-policy)"
        )


def check_rewards_and_hooks(arguments: Arguments) -> Iterator[str]:
    """There is one reward, and hooks are written ``module:attr``; they are loaded later, once."""
    rollout = arguments.rollout
    if rollout.rm_type is None and rollout.custom_rm_path is None:
        yield "no reward: give --rm-type (exact_match) or --custom-rm-path module:attr"
    if rollout.rm_type is not None and rollout.custom_rm_path is not None:
        yield f"--rm-type {rollout.rm_type} and --custom-rm-path {rollout.custom_rm_path}: give one of them"
    if rollout.rm_type == "exact_match" and arguments.data.label_key is None:
        yield "--rm-type exact_match compares with a label: --label-key none leaves it without"
    for name in ("custom_generate_function_path", "custom_rm_path", "group_filter_path"):
        path, flag = getattr(rollout, name), "--" + name.replace("_", "-")
        if path is not None and not re.fullmatch(r"[\w.]+:\w+", path):
            yield f"{flag} {path}: expected module:attr, such as my_package.my_module:my_function"


def check_deadlines(arguments: Arguments) -> Iterator[str]:
    """The watchdog is slower than everything it watches: else it ends healthy runs (C3, C10)."""
    limit = arguments.observability.stall_timeout
    watched = {
        "--request-timeout": arguments.engines.request_timeout,
        "--reward-timeout": arguments.rollout.reward_timeout,
        "--publication-timeout": arguments.weights.publication_timeout,
    }
    for flag, seconds in watched.items():
        if limit < seconds:
            yield (
                f"--stall-timeout {limit:g} is shorter than {flag} {seconds:g}: a run that only waits for "
                "one slow "
                "answer would be stopped as stalled; raise the first or lower the second"
            )


CHECKS: tuple[Check, ...] = (
    check_model,
    check_prompt_files,
    check_algorithm,
    check_staleness,
    check_off_policy_correction,
    check_rewards_and_hooks,
    check_deadlines,
    check_outputs,
    check_router_port,
)

DIVIDING_CHECKS: tuple[Check, ...] = (check_model_fits, check_ranks, check_batches)
"""They divide by sizes, so they wait until every size is at least 1."""
