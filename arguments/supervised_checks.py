"""Check the flags of supervised fine-tuning: none may be given that has no effect there (C12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from miles_async.arguments import Arguments
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.rewards import RewardArguments
from miles_async.arguments.sessions import SessionsArguments
from miles_async.arguments.staleness import StalenessArguments

USED = frozenset({"loss_type", "loss_aggregation", "loss_length_normalizer", "log_entropy"})
"""Fields of AlgorithmArguments that have an effect without samples."""


Unused = (
    AlgorithmArguments
    | CriticArguments
    | RewardArguments
    | EvaluationArguments
    | StalenessArguments
    | SessionsArguments
)
"""Groups of flags that are for sampled data, but for ``USED``."""


def check_supervised(arguments: Arguments) -> Iterator[str]:
    """Check that no flag about sampling or rewards is given with --loss-type sft_loss."""
    rollout, debug = arguments.rollout, arguments.debug
    if (samples := rollout.n_samples_per_prompt) != 1:
        yield f"--loss-type sft_loss with --n-samples-per-prompt {samples}: a row is one example; use 1"
    if (temperature := rollout.rollout_temperature) != 1:
        yield f"--loss-type sft_loss with --rollout-temperature {temperature:g}, at which answers are learned: use 1"
    given = [
        *_changed(arguments.algorithm, USED),
        *_changed(arguments.critic),
        *_changed(arguments.rewards),
        *_changed(arguments.evaluation),
        *_changed(arguments.staleness),
        *_changed(arguments.sessions),
    ]
    switches = {
        "--debug-rollout-only": debug.debug_rollout_only,
        "--load-debug-rollout-data": debug.load_debug_rollout_data,
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--server-groups": arguments.engines.server_groups,
        "--colocate": arguments.cluster.colocate,
        "--rollout-max-prompt-len": arguments.data.rollout_max_prompt_len,
    }
    for flag in (*given, *(flag for flag, value in switches.items() if value)):
        yield f"{flag} has no effect with --loss-type sft_loss, which samples and rewards nothing: leave it out"
    if arguments.optimizer.max_logprob_diff is not None:
        yield "--max-logprob-diff compares with engines, of which --loss-type sft_loss has none: leave it out"
    if arguments.optimizer.ess_lr_scaling is not None:
        yield "--ess-lr-scaling weighs samples, of which --loss-type sft_loss has none: leave it out"
    if arguments.algorithm.loss_aggregation == "sequence_sum" and arguments.algorithm.loss_length_normalizer is None:
        yield "--loss-aggregation sequence_sum divides by --loss-length-normalizer: give it"


def _changed(group: Unused, used: frozenset[str] = frozenset()) -> Iterator[str]:
    plain = type(group)()
    for field in fields(group):
        if field.name not in used and getattr(group, field.name) != getattr(plain, field.name):
            yield f"--{field.name.replace('_', '-')}"
