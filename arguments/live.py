"""Flags that ``miles-async set`` changes while a run is live, and requests that it makes of one.

One table: a new name here also needs the part that applies it (``RolloutSide.change``, ``TrainerSide.change``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.problems import refuse
from miles_async.arguments.specification import flag_specifications
from miles_async.arguments.validation import flag_problems
from miles_async.arguments.words import did_you_mean
from miles_async.types import KeptSetting, SettingValue

IN_FORCE: Mapping[str, Callable[[Arguments], SettingValue]] = {
    "max_weight_staleness": lambda a: a.staleness.bound,
    "max_rollout_lead": lambda a: a.staleness.lead,
    "rollout_concurrency_per_engine": lambda a: a.rollout.rollout_concurrency_per_engine,
    "lr": lambda a: a.optimizer.lr,
    "entropy_coef": lambda a: a.algorithm.entropy_coef,
    "kl_loss_coef": lambda a: a.algorithm.kl_loss_coef,
    "kl_coef": lambda a: a.algorithm.kl_coef,
}
"""Flag → its value in force, with the defaults that follow from other flags."""

REQUESTS: Mapping[str, tuple[str, ...]] = {
    "evaluation": ("now",),
    "checkpoint": ("now",),
    "generation": ("paused", "running"),
    "stop": ("after-step",),
}
"""Request → its words."""


def in_force(arguments: Arguments) -> dict[str, SettingValue]:
    """The values in force of all flags that may change."""
    return {name: value(arguments) for name, value in IN_FORCE.items()}


def parse_changes(words: Mapping[str, str]) -> tuple[dict[str, FlagValue], dict[str, str]]:
    """Name → text as typed, as (flags by field, requests). Raises ConfigurationError listing all problems."""
    flags: dict[str, FlagValue] = {}
    requests: dict[str, str] = {}
    problems = []
    for word, text in words.items():
        name = word.removeprefix("--").replace("-", "_")
        if name in REQUESTS:
            requests[name] = text
            if text not in REQUESTS[name]:
                problems.append(f"{name}: expected {' or '.join(REQUESTS[name])}, found {text!r}")
        elif name in IN_FORCE:
            try:
                flags[name] = flag_specifications()[name].from_text(text)
            except ValueError as error:
                problems.append(f"{as_typed(name)}: {error}")
        elif name in flag_specifications():
            problems.append(f"--{as_typed(name)} cannot change while the run is live: {_settable()} can")
        else:
            hint = did_you_mean(as_typed(name), [as_typed(each) for each in (*IN_FORCE, *REQUESTS)])
            problems.append(f"there is no setting {word}{hint or f'; there are {_settable()}'}")
    refuse(problems)
    return flags, requests


def with_flags(arguments: Arguments, flags: Mapping[str, FlagValue]) -> Arguments:
    """``arguments`` with other values of these flags, by field. They are not checked."""
    for name, value in flags.items():
        group = flag_specifications()[name].group
        changed = dataclasses.replace(getattr(arguments, group), **{name: value})
        arguments = dataclasses.replace(arguments, **{group: changed})
    return arguments


def with_kept(arguments: Arguments, kept: Mapping[str, KeptSetting]) -> tuple[Arguments, list[str]]:
    """``arguments`` of a run that resumes, with settings of its checkpoint, and a note for each of these.

    A setting is taken over where the flag is still the one that it replaced; a flag with another value wins.
    """
    taken: dict[str, FlagValue] = {}
    notes = []
    for name, setting in kept.items():
        flag, given = flag_specifications()[name].flag, value_of(arguments, name)
        if given == setting.flag:
            taken[name] = setting.value
            notes.append(f"{flag} {setting.value} instead of {given}: set before the checkpoint was written")
        else:
            notes.append(f"{flag} {given}, and not {setting.value} as set before the checkpoint: the flag is another")
    return with_flags(arguments, taken), notes


def value_of(arguments: Arguments, name: str) -> SettingValue:
    """Value of a flag that may change, by its field."""
    value: SettingValue = getattr(getattr(arguments, flag_specifications()[name].group), name)
    return value


def check_change(started: Arguments, now: Arguments, wanted: Arguments) -> None:
    """Check flags as at the start of a run, and whether a live one can follow.

    ``started``: what the parts of the run were built for. Raises ConfigurationError listing all problems.
    """
    refuse([*flag_problems(wanted), *_live_problems(started, now, wanted)])


def check_requests(arguments: Arguments, requests: Mapping[str, str]) -> None:
    """Check that the run supports the requests. Raises ConfigurationError listing all problems."""
    problems = []
    if "evaluation" in requests and not arguments.evaluation.evaluates:
        problems.append("evaluation: the run has neither --eval-prompt-data nor --eval-config")
    if "checkpoint" in requests and arguments.checkpoint.save is None:
        problems.append("checkpoint: the run has no --save, where it would go")
    refuse(problems)


def _live_problems(started: Arguments, now: Arguments, wanted: Arguments) -> Iterator[str]:
    before, after = in_force(now), in_force(wanted)
    changed = {name for name in IN_FORCE if before[name] != after[name]}
    staleness, algorithm = now.staleness, now.algorithm
    bound, highest = wanted.staleness.bound, started.staleness.bound
    if "max_weight_staleness" in changed:
        lower = bound is not None and (staleness.bound is None or bound < staleness.bound)
        if lower and staleness.stale_group_action == "wait":
            yield (
                f"max-weight-staleness {bound}: with --stale-group-action wait nothing may become too old, and a lower "
                f"bound makes what is buffered so; expected {staleness.bound} or more"
            )
        if algorithm.prox_logp_method == "snapshots" and (highest is None or bound is None or bound > highest):
            yield (
                f"max-weight-staleness {bound}: --prox-logp-method snapshots keeps the weights of as many versions as "
                f"the run started with; expected at most {highest}"
            )
    most = started.rollout.rollout_concurrency_per_engine
    if (wanted_most := wanted.rollout.rollout_concurrency_per_engine) > most:
        yield (
            f"rollout-concurrency-per-engine {wanted_most}: engines and connections were made for the {most} that the "
            f"run started with; expected at most {most}"
        )
    if "entropy_coef" in changed and algorithm.entropy_coef_end is not None:
        yield f"entropy-coef: --entropy-coef-end {algorithm.entropy_coef_end:g} moves it during the run already"
    for name in sorted(changed & {"kl_loss_coef", "kl_coef"}):
        if algorithm.kl_target is not None:
            yield f"{as_typed(name)}: --kl-target {algorithm.kl_target:g} adapts it during the run already"
    if "kl_coef" in changed and algorithm.token_advantages != "kl_in_reward":
        yield "kl-coef: it changes with --token-advantages kl_in_reward only"


def as_typed(name: str) -> str:
    return name.replace("_", "-")


def _settable() -> str:
    return ", ".join(map(as_typed, (*IN_FORCE, *REQUESTS)))
