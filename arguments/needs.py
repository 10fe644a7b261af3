"""Check that every flag that is given has an effect: what it needs, as its declaration says, is given too (C12)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import readable_sets
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.problems import given
from miles_async.arguments.specification import MODULE_ATTR, FlagSpecification, flag_specifications

HARMLESS_GROUPS = ("observability",)
"""Groups whose flags change nothing about what is learned: one without effect is a note."""

HARMLESS = ("kl_loss_type", "stale_group_action", "rm_workers")
"""Others that are only noted: recipes of slime give the first, and `miles-async set` may give a bound later."""


def check_needs(arguments: Arguments, problems: Sequence[str]) -> Iterator[str]:
    """Check that no flag differs from its default while nothing that it needs is given.

    ``problems`` found already: a flag that they name is left to them, so that one mistake gives one message.
    """
    named = {word.rstrip(":,;") for problem in problems for word in problem.split()}
    flags = (flag for flag in flag_specifications().values() if not _is_harmless(flag))
    yield from _without_effect(arguments, (flag for flag in flags if not named & {flag.flag, flag.negated_flag}))


def need_notes(arguments: Arguments) -> Iterator[str]:
    """Yield notes about harmless flags without effect, and about flags that another one replaces."""
    flags = (flag for flag in flag_specifications().values() if _is_harmless(flag))
    yield from _without_effect(arguments, flags)
    for flag in flag_specifications().values():
        value = flag.value_in(arguments)
        replacement = next((name for name in flag.replaced_by if _holds(arguments, name)), None)
        if replacement is not None and value != flag.default:
            replacing = flag_specifications()[replacement].flag
            yield f"{_as_typed(flag, value)} has no effect with {replacing}, which takes its place"


def value_notes(arguments: Arguments) -> Iterator[str]:
    """Yield notes about flags whose value changes nothing next to the values of others."""
    algorithm, staleness, evaluation = arguments.algorithm, arguments.staleness, arguments.evaluation
    bound, oldest = staleness.bound, algorithm.max_token_age
    bounded = "--on-policy" if staleness.on_policy else f"--max-weight-staleness {bound}"
    if bound is not None and oldest is not None and oldest >= bound:
        yield f"--max-token-age {oldest} has no effect with {bounded}: no token that is trained is older"
    if bound == 0 and algorithm.token_age_decay != 1:
        yield f"--token-age-decay {algorithm.token_age_decay} has no effect with {bounded}: every age is 0"
    if algorithm.allow_uncorrected_off_policy and algorithm.heeds_rollout_logprobs:
        correction = "--use-tis" if algorithm.use_tis else "--use-rollout-logprobs"
        yield f"--allow-uncorrected-off-policy has no effect with {correction}, which corrects"
    held_out = readable_sets(evaluation)
    cuts = {
        f"--eval-top-p {evaluation.eval_top_p:g}": evaluation.eval_top_p != 1,
        f"--eval-top-k {evaluation.eval_top_k}": evaluation.eval_top_k != -1,
    }
    own = held_out and not evaluation.eval_only  # `miles-async rollout` takes --rollout-top-p for them
    if own and all(each.temperature_in_force(evaluation, arguments.rollout) == 0 for each in held_out):
        for flag in given(cuts):
            yield f"{flag} has no effect with greedy evaluation: give --eval-temperature, or leave it out"
    if arguments.observability.wandb_sample_steps and not arguments.observability.save_samples:
        yield "--wandb-sample-steps has no effect with --save-samples 0: the table shows saved samples"
    if not arguments.model.sequence_parallel and arguments.model.tensor_model_parallel_size == 1:
        yield "--no-sequence-parallel has no effect with --tensor-model-parallel-size 1: nothing is split"


def reward_notes(arguments: Arguments, names: Collection[str]) -> Iterator[str]:
    """Yield notes about flags of rewards that rows might name, and do not. ``names``: of the rewards in use."""
    if arguments.data.metadata_key is None:
        return  # then such flags have been refused
    for flag in flag_specifications().values():
        rewards = [need.removeprefix("rm_type=") for need in flag.needs if need.startswith("rm_type=")]
        others = (need for need in flag.needs if not need.startswith("rm_type=") and need != "metadata_key")
        value = flag.value_in(arguments)
        used = {*rewards} & {*names} or any(_holds(arguments, other) for other in others)
        if rewards and value != flag.default and not used:
            yield f"{_as_typed(flag, value)} has no effect: neither --rm-type nor a row names {_joined(rewards, 'or')}"


def _is_harmless(flag: FlagSpecification) -> bool:
    return flag.group in HARMLESS_GROUPS or flag.name in HARMLESS


def _without_effect(arguments: Arguments, flags: Iterable[FlagSpecification]) -> Iterator[str]:
    idle: dict[tuple[str, ...], list[str]] = {}
    for flag in flags:
        value, others = flag.value_in(arguments), (*flag.needs, *flag.replaced_by)
        if flag.needs and value != flag.default and not any(_holds(arguments, other) for other in others):
            idle.setdefault(flag.needs, []).append(_as_typed(flag, value))
    for needs, named in idle.items():
        yield f"{_joined(named, 'and')} {'has' if len(named) == 1 else 'have'} no effect without {_alternatives(needs)}"


def _holds(arguments: Arguments, need: str) -> bool:
    name, equals, wanted = need.partition("=")
    flag = flag_specifications()[name]
    value = flag.value_in(arguments)
    if not equals:
        zero = value == 0 and flag.default is not None  # a bound of 0 is one, a rank of 0 is none
        return not zero and value is not None and value is not False and value != ()
    if name == "rm_type":
        held_out = (each.rewards(arguments.rewards).rm_type for each in readable_sets(arguments.evaluation))
        return any(_names(rewards, wanted) for rewards in (value, *held_out))
    if wanted == "own":
        return isinstance(value, str) and re.fullmatch(MODULE_ATTR, value) is not None
    return _names(value, wanted)


def _names(value: FlagValue, wanted: str) -> bool:
    return isinstance(value, str) and wanted in (value, *re.split(r"[:+]", value))  # math:1.0+format:0.1


def _alternatives(needs: Sequence[str]) -> str:
    """``--token-advantages kl_in_reward or gae``; user code is left out."""
    pairs = [need.partition("=")[::2] for need in needs if not need.endswith("=own")]
    flags = [
        " ".join(filter(None, (flag_specifications()[name].flag, " or ".join(value for _, value in same if value))))
        for name, same in groupby(pairs, key=lambda pair: pair[0])
    ]
    return _joined(flags, "or")


def _joined(words: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _as_typed(flag: FlagSpecification, value: FlagValue) -> str:
    match value:
        case bool():
            return flag.flag if value else flag.negated_flag
        case tuple():
            return " ".join((flag.flag, *value))
        case None:
            return f"{flag.flag} none"
        case Path() | int() | float() | str():
            return f"{flag.flag} {value}"
