"""Checks of the trainer's flags together: what its layers support, how batches divide, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.model import RECOMPUTE_MODULES
from miles_async.arguments.problems import given
from miles_async.arguments.specification import group_flags
from miles_async.arguments.words import did_you_mean

USED = frozenset({"loss_type", "loss_aggregation", "loss_length_normalizer", "log_entropy"})
"""Fields of AlgorithmArguments that have an effect without samples."""

UNUSED_GROUPS = ("algorithm", "critic", "rewards", "evaluation", "staleness", "sessions")
"""Groups of flags that are for sampled data, but for ``USED``."""


def check_recomputation(arguments: Arguments) -> Iterator[str]:
    """Check the flags of recomputation against --recompute-granularity."""
    model = arguments.model
    if unknown := [name for name in model.recompute_modules if name not in RECOMPUTE_MODULES]:
        yield f"--recompute-modules: expected some of {', '.join(RECOMPUTE_MODULES)}, found {' '.join(unknown)}" + (
            did_you_mean(unknown[0], RECOMPUTE_MODULES)
        )


def check_shared_prefixes(arguments: Arguments) -> Iterator[str]:
    """Check that the model's layers support --share-prefixes."""
    if not arguments.model.share_prefixes:
        return
    if arguments.cluster.device != "cpu":
        yield (
            f"--share-prefixes with --device {arguments.cluster.device}: attention on GPUs takes whole samples; leave "
            "it out, or use --device cpu"
        )
    if (ranks := arguments.model.context_parallel_size) > 1:
        yield f"--share-prefixes with --context-parallel-size {ranks}, which splits every sample: leave one of them out"


def check_ahead_layers(arguments: Arguments) -> Iterator[str]:
    """Check --enable-mtp-training against flags that its layers do not support."""
    model = arguments.model
    others = {
        f"--context-parallel-size {model.context_parallel_size}": model.context_parallel_size > 1,
        f"--lora-rank {model.lora_rank}": model.lora_rank > 0,
        "--share-prefixes": model.share_prefixes,
    }
    for flag in given(others) if model.enable_mtp_training else ():
        yield f"--enable-mtp-training with {flag} is not implemented: leave one of them out"


def check_batches(arguments: Arguments) -> Iterator[str]:
    """Check that rollout batches divide into optimizer steps, these over ranks, and that samples fit micro-batches."""
    rollout, optimizer = arguments.rollout, arguments.optimizer
    samples, batch = rollout.samples_per_rollout, arguments.global_batch_size
    steps = optimizer.num_steps_per_rollout
    if steps is not None and samples % steps:
        yield (
            f"--rollout-batch-size {rollout.rollout_batch_size} × --n-samples-per-prompt "
            f"{rollout.n_samples_per_prompt} = {samples} samples do not divide into --num-steps-per-rollout {steps}"
        )
    elif steps is not None and samples // steps != batch:
        yield (
            f"--num-steps-per-rollout {steps} of {samples} samples are {samples // steps} per step, "
            f"--global-batch-size is {batch}: give one of them"
        )
    elif samples % batch:
        yield (
            f"--rollout-batch-size {rollout.rollout_batch_size} × --n-samples-per-prompt "
            f"{rollout.n_samples_per_prompt} = {samples} samples do not divide into optimizer steps of "
            f"--global-batch-size {batch}"
        )
    if batch < arguments.data_parallel_size:
        yield (
            f"{batch} samples per optimizer step cannot be split over {arguments.data_parallel_size} data-parallel "
            "ranks: raise --global-batch-size (or --rollout-batch-size), or train with fewer ranks "
            "(--actor-num-gpus-per-node)"
        )
    longest = arguments.longest_sample
    if arguments.micro_batch_tokens < longest and arguments.sessions.is_multi_turn:  # which end at what a batch holds
        prompt = arguments.data.rollout_max_prompt_len
        known = f"--rollout-max-prompt-len {prompt} + " if prompt else "a prompt and "
        ranks = arguments.model.context_parallel_size
        on_each = f" on each of {ranks} context-parallel ranks" if ranks > 1 else ""
        yield (
            f"--max-tokens-per-gpu {optimizer.max_tokens_per_gpu}{on_each} cannot hold the longest sample: {known}"
            f"--rollout-max-response-len {rollout.rollout_max_response_len}: raise it to at least "
            f"{-(-longest // ranks)}"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is larger than --lr {optimizer.lr}"


def check_bad_steps(arguments: Arguments) -> Iterator[str]:
    """Check that limits of optimizer steps have an effect in this run."""
    optimizer = arguments.optimizer
    if optimizer.max_logprob_diff is not None and arguments.debug.sides == "trainer":
        yield (
            f"--max-logprob-diff {optimizer.max_logprob_diff} compares the trainer with the engines that served its "
            "weights, and batches of --load-debug-rollout-data come from another run: leave it out"
        )


def check_supervised(arguments: Arguments) -> Iterator[str]:
    """Check that no flag about sampling or rewards is given with --loss-type sft_loss, where it has no effect (C12)."""
    rollout, debug = arguments.rollout, arguments.debug
    if (samples := rollout.n_samples_per_prompt) != 1:
        yield f"--loss-type sft_loss with --n-samples-per-prompt {samples}: a row is one example; use 1"
    if (temperature := rollout.rollout_temperature) != 1:
        yield f"--loss-type sft_loss with --rollout-temperature {temperature:g}, at which answers are learned: use 1"
    unused = (flag for group in UNUSED_GROUPS for flag in group_flags(group) if flag.name not in USED)
    changed = [flag.flag for flag in unused if flag.value_in(arguments) != flag.default]
    switches = {
        "--debug-rollout-only": debug.debug_rollout_only,
        "--load-debug-rollout-data": debug.load_debug_rollout_data,
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--server-groups": arguments.engines.server_groups,
        "--colocate": arguments.cluster.colocate,
        "--rollout-max-prompt-len": arguments.data.rollout_max_prompt_len,
        "--prompt-sampler difficulty": arguments.data.prompt_sampler == "difficulty",
    }
    for flag in (*changed, *given(switches)):
        yield f"{flag} has no effect with --loss-type sft_loss, which samples and rewards nothing: leave it out"
    if arguments.optimizer.max_logprob_diff is not None:
        yield "--max-logprob-diff compares with engines, which --loss-type sft_loss does not start: leave it out"
    if arguments.optimizer.ess_lr_scaling is not None:
        yield "--ess-lr-scaling weighs samples, and --loss-type sft_loss has none: leave it out"
    if arguments.algorithm.loss_aggregation == "sequence_sum" and arguments.algorithm.loss_length_normalizer is None:
        yield "--loss-aggregation sequence_sum divides by --loss-length-normalizer: give it"
