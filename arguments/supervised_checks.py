"""Check the flags of supervised fine-tuning: none may be given that has no effect there (C12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from miles_async.arguments import Arguments

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

USED = frozenset({"loss_type", "loss_aggregation", "loss_length_normalizer", "log_entropy"})
"""Fields of AlgorithmArguments that have an effect without samples."""


UNUSED_GROUPS = ("algorithm", "critic", "rewards", "evaluation", "staleness", "sessions")
"""Groups of flags that are for sampled data, but for ``USED``."""


def check_supervised(arguments: Arguments) -> Iterator[str]:
    """Check that no flag about sampling or rewards is given with --loss-type sft_loss."""
    rollout, debug = arguments.rollout, arguments.debug
    if (samples := rollout.n_samples_per_prompt) != 1:
        yield f"--loss-type sft_loss with --n-samples-per-prompt {samples}: a row is one example; use 1"
    if (temperature := rollout.rollout_temperature) != 1:
        yield f"--loss-type sft_loss with --rollout-temperature {temperature:g}, at which answers are learned: use 1"
    given = [flag for group in UNUSED_GROUPS for flag in _changed(getattr(arguments, group))]
    switches = {
        "--debug-rollout-only": debug.debug_rollout_only,
        "--load-debug-rollout-data": debug.load_debug_rollout_data,
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--server-groups": arguments.engines.server_groups,
        "--colocate": arguments.cluster.colocate,
        "--rollout-max-prompt-len": arguments.data.rollout_max_prompt_len,
        "--prompt-sampler difficulty": arguments.data.prompt_sampler == "difficulty",
    }
    for flag in (*given, *(flag for flag, value in switches.items() if value)):
        yield f"{flag} has no effect with --loss-type sft_loss, which samples and rewards nothing: leave it out"
    if arguments.optimizer.max_logprob_diff is not None:
        yield "--max-logprob-diff compares with engines, which --loss-type sft_loss does not start: leave it out"
    if arguments.optimizer.ess_lr_scaling is not None:
        yield "--ess-lr-scaling weighs samples, and --loss-type sft_loss has none: leave it out"
    if arguments.algorithm.loss_aggregation == "sequence_sum" and arguments.algorithm.loss_length_normalizer is None:
        yield "--loss-aggregation sequence_sum divides by --loss-length-normalizer: give it"


def _changed(group: DataclassInstance) -> Iterator[str]:
    for field in fields(group):
        if field.name not in USED and getattr(group, field.name) != field.default:
            yield f"--{field.name.replace('_', '-')}"
