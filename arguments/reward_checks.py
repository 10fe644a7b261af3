"""Check the flags of rewards and group filters together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from miles_async.arguments import Arguments, DataArguments
from miles_async.arguments.evaluation_sets import readable_sets
from miles_async.arguments.problems import refusal
from miles_async.arguments.rewards import (
    COMPARING_REWARDS,
    RewardArguments,
    parse_group_filters,
    parse_judge_scale,
    parse_rm_type,
)
from miles_async.arguments.sessions import is_url
from miles_async.errors import ConfigurationError


def check_rewards(arguments: Arguments) -> Iterator[str]:
    """Check that exactly one reward is given, with its settings."""
    rewards = arguments.rewards
    held_out = readable_sets(arguments.evaluation)
    own = [each for each in held_out if each.names_reward]
    if not arguments.has_reward and len(own) < len(held_out):
        flag = "--eval-prompt-data" if arguments.evaluation.eval_prompt_data else "--eval-config"
        yield f"{flag} without a reward, which evaluation is about: give --rm-type or --custom-rm-path"
    elif not arguments.has_reward and arguments.algorithm.advantage_estimator != "on_policy_distillation":
        yield (
            "no reward: give --rm-type (math, for instance) or --custom-rm-path module:attr (or learn from a teacher "
            "alone: --use-opd --advantage-estimator on_policy_distillation)"
        )
    elif not arguments.has_reward and arguments.staleness.batch_order == "reward_variance":
        yield "--batch-order reward_variance without a reward to compare: give --rm-type or --custom-rm-path"
    if rewards.rm_type is not None and rewards.custom_rm_path is not None:
        yield f"--rm-type {rewards.rm_type} and --custom-rm-path {rewards.custom_rm_path}: give one of them"
    yield from _named_problems(rewards, arguments.data)
    for each in own:
        where = f"--eval-config {arguments.evaluation.eval_config}: {each.name}: "
        problems = _named_problems(each.rewards(rewards), each.data(arguments.data))
        yield from (where + problem for problem in problems)
    for flag, url in {"--rm-url": rewards.rm_url, "--judge-url": rewards.judge_url}.items():
        if url is not None and not is_url(url):
            yield f"{flag} {url}: expected a URL, such as http://127.0.0.1:8000/v1"
    if (scale := rewards.judge_scale) is not None:
        yield from refusal(lambda: parse_judge_scale(scale))
    try:
        re.compile(rewards.rm_format)
    except re.error as error:
        yield f"--rm-format {rewards.rm_format}: expected a regular expression: {error}"


def _named_problems(rewards: RewardArguments, data: DataArguments) -> Iterator[str]:
    """Check that a reward by name has what it needs."""
    try:
        names = {name for name, _ in parse_rm_type(rewards.rm_type or "")}
    except ConfigurationError as error:
        yield str(error)
        return
    if (comparing := sorted(names & {*COMPARING_REWARDS})) and data.label_key is None:
        yield f"--rm-type {' and '.join(comparing)} compares with a label: --label-key none leaves it without"
    if "reasoning_gym" in names and data.metadata_key is None:
        yield "--rm-type reasoning_gym finds its task in the row's metadata: give --metadata-key"
    if "code" in names and data.metadata_key is None and data.label_key is None:
        yield "--rm-type code finds its tests in the row's metadata or label: give --metadata-key or --label-key"
    if "remote_rm" in names and rewards.rm_url is None:
        yield "--rm-type remote_rm asks a server: give --rm-url"
    if "judge" in names and None in (rewards.judge_url, rewards.judge_template, rewards.judge_scale):
        yield "--rm-type judge asks a model: give --judge-url, --judge-template and --judge-scale"


def check_group_filters(arguments: Arguments) -> Iterator[str]:
    """Check that filters exist and can let a group pass: otherwise the run would generate forever (C3)."""
    try:
        filters = dict(parse_group_filters(arguments.rewards.group_filter))
    except ConfigurationError as error:
        yield str(error)
        return
    rollout = arguments.rollout
    if "zero_variance" in filters and not arguments.has_reward:
        yield "--group-filter zero_variance without a reward: nothing would pass; give --rm-type or --custom-rm-path"
    if "zero_variance" in filters and rollout.n_samples_per_prompt == 1:
        yield "--group-filter zero_variance: with --n-samples-per-prompt 1 all rewards of a group are equal"
    if (tokens := filters.get("max_length")) is not None and not 1 <= tokens < rollout.rollout_max_response_len:
        yield (
            f"--group-filter max_length:{tokens:g}: expected at least 1, and less than --rollout-max-response-len "
            f"{rollout.rollout_max_response_len}, above which there is nothing to filter"
        )
    if (fraction := filters.get("truncated")) is not None and not 0 <= fraction < 1:
        yield f"--group-filter truncated:{fraction:g}: expected a fraction, at least 0 and less than 1"
