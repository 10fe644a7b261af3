"""Rewards and group filters. docs/rewards.md describes each name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError

COMPARING_REWARDS = ("exact_match", "math", "f1", "multiple_choice")
"""Rewards that compare with the label and work without anything else."""

REWARD_NAMES = (*COMPARING_REWARDS, "code", "format", "reasoning_gym", "remote_rm", "judge")
"""Names for ``--rm-type`` and the rows' ``rm_type``."""

FILTERS = ("zero_variance", "aborted")
NUMBERED_FILTERS = ("max_length", "truncated")
"""Filters that have a number behind a colon."""

Named = tuple[str, float | None]
"""A name and the number behind its colon."""

SandboxMode = Literal["auto", "strict", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardArguments:
    """Rewards"""

    rm_type: str | None = flag(
        None,
        f"reward by name ({', '.join(REWARD_NAMES)}), or a weighted sum such as math:1.0+format:0.1; a row whose "
        "metadata has rm_type is rewarded by that instead",
        metavar="NAME[:WEIGHT][+...]",
    )
    custom_rm_path: str | None = flag(None, "module:attr of your own Reward", metavar="MODULE:ATTR")
    group_rm_path: str | None = flag(
        None,
        "module:attr of your own GroupReward, which rewards all samples of a prompt together, after the other rewards",
        metavar="MODULE:ATTR",
    )
    reward_timeout: float = flag(
        60.0, "timeout of one reward in seconds, excluding queueing", metavar="SECONDS", above=0
    )
    rm_workers: int = flag(
        8,
        "maximum number of processes that verify answers or run code",
        needs=("rm_type=math", "rm_type=format", "rm_type=code", "rm_type=reasoning_gym", "metadata_key"),
        at_least=1,
        at_most=10_000,
    )
    rm_url: str | None = flag(
        None,
        "URL to which remote_rm posts prompt, response, label and metadata as JSON for the reward",
        metavar="URL",
        needs=("rm_type=remote_rm", "metadata_key"),
    )
    judge_url: str | None = flag(
        None,
        "base URL of the judge, as OpenAI's clients take it: http://host:port/v1",
        metavar="URL",
        needs=("rm_type=judge", "metadata_key"),
    )
    judge_model: str = flag("default", "name of the model that judges", metavar="NAME", needs=("judge_url",))
    judge_template: Path | None = flag(
        None,
        "file with the question for the judge; {prompt}, {response}, {answer} and {label} are filled in",
        needs=("judge_url",),
    )
    judge_scale: str | None = flag(
        None,
        "marks that the judge may give, such as 0-10; its last line must be one; the reward is 0 for the lowest and "
        "1 for the highest",
        metavar="LOW-HIGH",
        needs=("judge_url",),
    )
    rm_format: str = flag(
        r"(?:<think>)?+\s*+(?!</think>).*?</think>\s*+\S.*",
        "regular expression that format matches with the whole response (default: thoughts, </think>, an answer)",
        metavar="REGEX",
        needs=("rm_type=format", "metadata_key"),
    )
    rm_code_timeout: float = flag(
        10.0,
        "seconds a program may take for one test",
        metavar="SECONDS",
        needs=("rm_type=code", "metadata_key"),
        above=0,
    )
    rm_code_memory: int = flag(
        1024,
        "MiB of address space a program may have",
        metavar="MIB",
        needs=("rm_type=code", "metadata_key"),
        at_least=256,
    )
    reward_sandbox: SandboxMode = flag(
        "auto",
        "confinement of what the rewards code and reasoning_gym execute: auto (seccomp, and Landlock if the kernel has "
        "it), strict (both, or the run doesn't start), off (only limits of time and memory)",
        needs=("rm_type=code", "rm_type=reasoning_gym", "environment", "metadata_key"),
    )
    group_filter: tuple[str, ...] = flag(
        (),
        "groups to replace instead of training on them: zero_variance (all rewards equal), aborted, max_length:TOKENS "
        "(a response is longer), truncated:FRACTION (a larger fraction of responses reached the length limit)",
        metavar="NAME[:NUMBER]",
    )
    group_filter_path: str | None = flag(
        None, "module:attr of your own GroupFilter, asked after --group-filter", metavar="MODULE:ATTR"
    )

    @property
    def named(self) -> str | None:
        """Rewards that flags name, for people; None without any."""
        return " → ".join(filter(None, (self.custom_rm_path or self.rm_type, self.group_rm_path))) or None


def parse_rm_type(text: str) -> tuple[tuple[str, float], ...]:
    """Names and weights of a reward; none of an empty text. Raises ConfigurationError.

    >>> parse_rm_type("math+format:0.1")
    (('math', 1.0), ('format', 0.1))
    """
    parts = [_named(part.strip(), "--rm-type", REWARD_NAMES) for part in text.split("+")] if text else []
    return tuple((name, 1.0 if weight is None else weight) for name, weight in parts)


def parse_judge_scale(text: str) -> tuple[float, float]:
    """Lowest and highest mark of a judge. Raises ConfigurationError.

    >>> parse_judge_scale("1-5")
    (1.0, 5.0)
    """
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)-([0-9]{1,6}(?:\.[0-9]{1,6})?)", text)
    if found is None or float(found[1]) >= float(found[2]):
        raise ConfigurationError(
            f"--judge-scale: expected the lowest and the highest mark, such as 0-10; found {text!r}"
        )
    return float(found[1]), float(found[2])


def parse_group_filters(words: Sequence[str]) -> tuple[Named, ...]:
    """Names and numbers of filters. Raises ConfigurationError.

    >>> parse_group_filters(["zero_variance", "max_length:512"])
    (('zero_variance', None), ('max_length', 512.0))
    """
    filters = tuple(_named(word, "--group-filter", (*FILTERS, *NUMBERED_FILTERS)) for word in words)
    for name, number in filters:
        if number is None and name in NUMBERED_FILTERS:
            raise ConfigurationError(f"--group-filter {name}: expected a number after it, such as {name}:0.5")
        if number is not None and name in FILTERS:
            raise ConfigurationError(f"--group-filter {name}:{number:g}: {name} takes no number")
    return filters


def _named(text: str, flag_name: str, names: Collection[str]) -> Named:
    """``name`` or ``name:number``."""
    name, colon, number_text = text.partition(":")
    if name not in names:
        hint = did_you_mean(name, names, close=0.6)
        raise ConfigurationError(f"{flag_name}: expected one of {', '.join(names)}; found {name!r}{hint}")
    if not colon:
        return name, None
    try:
        number = float(number_text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{flag_name} {text}: expected a number after {name}:, found {number_text!r}")
    return name, number
