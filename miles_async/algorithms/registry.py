"""Registry: a row for each algorithm that a flag can name, and a function for each flag that makes the chosen one.

A name stands for the ``module:attr`` of its row; any other ``module:attr`` is the user's. Modules are imported on
demand, since the rollout side makes its estimator here without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, get_args

from miles_async.api import (
    AdvantageEstimator,
    Aggregation,
    Correction,
    KlEstimator,
    Need,
    PolicyLoss,
    TokenAdvantages,
)
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import ConfigurationError
from miles_async.runtime.hooks import load_factory, load_object

HERE = "miles_async.algorithms"
WHOLE = f"{HERE}.whole_batch"

Switched = tuple[tuple[str, Callable[[AlgorithmArguments], bool], str], ...]
"""Optional parts, in any number: flag, condition, row."""

ADVANTAGE_ESTIMATORS = {
    "grpo": f"{HERE}.advantages.estimators:Grpo",
    "rloo": f"{HERE}.advantages.estimators:make_rloo",
    "opob": f"{HERE}.advantages.estimators:Grpo",  # the trainer replaces the mean: SAMPLE_TRANSFORMS
    "reinforce": f"{HERE}.advantages.estimators:make_reinforce",
    "token_rewards": f"{HERE}.advantages.estimators:make_token_rewards",
    "on_policy_distillation": f"{HERE}.advantages.estimators:make_on_policy_distillation",
}
TOKEN_ADVANTAGES = {
    "gae": f"{HERE}.token_advantages.gae:Gae",
    "kl_in_reward": f"{HERE}.token_advantages.kl_in_reward:KlInReward",
}
POLICY_LOSSES = {
    "ppo_clip": f"{HERE}.losses.ppo_clip:PpoClip",
    "gspo": f"{HERE}.losses.gspo:Gspo",
    "cispo": f"{HERE}.losses.weighted_reinforce:Cispo",
    "sapo": f"{HERE}.losses.sapo:Sapo",
    "gmpo": f"{HERE}.losses.gmpo:Gmpo",
    "dppo_tv": f"{HERE}.losses.dppo:DppoTv",
    "dppo_kl": f"{HERE}.losses.dppo:DppoKl",
    "clip_cov": f"{HERE}.losses.covariance:ClipCov",
    "kl_cov": f"{HERE}.losses.covariance:KlCov",
    "sat": f"{HERE}.losses.sat:Sat",
    "sat_gspo": f"{HERE}.losses.sat:SatGspo",
    "dis": f"{HERE}.losses.weighted_reinforce:Dis",
}
SFT_LOSS = f"{HERE}.losses.sft:SftLoss"
CORRECTIONS = {
    "truncate": f"{HERE}.corrections.importance:Truncate",
    "mask": f"{HERE}.corrections.importance:Mask",
}
SWITCHED: Switched = (
    ("--use-rs", lambda arguments: arguments.use_rs, f"{HERE}.corrections.reject:Reject"),
    ("--use-opsm", lambda arguments: arguments.use_opsm, f"{HERE}.corrections.opsm:Opsm"),
    ("--max-token-age", lambda arguments: arguments.weighs_ages, f"{HERE}.corrections.age:TokenAge"),
)
"""Corrections besides ``--tis-mode``."""
SAMPLE_TRANSFORMS: Switched = (
    (
        "--advantage-estimator",
        lambda given: given.advantage_estimator == "opob",
        f"{WHOLE}.optimal_baseline:OptimalBaseline",
    ),
)
"""Transforms of a whole rollout batch that run before ``--token-advantages``."""
TOKEN_TRANSFORMS: Switched = (
    ("--normalize-advantages", lambda given: given.normalize_advantages, f"{WHOLE}.whiten:Whiten"),
    ("--m2-threshold", lambda given: given.m2_threshold is not None, f"{WHOLE}.second_moment:WithinSecondMoment"),
)
"""Transforms that run after ``--token-advantages``, in this order."""
KL_ESTIMATORS = {
    "k1": f"{HERE}.kl:k1",
    "k2": f"{HERE}.kl:k2",
    "k3": f"{HERE}.kl:k3",
    "low_var_kl": f"{HERE}.kl:low_var_kl",
    "abs": f"{HERE}.kl:absolute",
}
AGGREGATIONS = {
    "token_mean": f"{HERE}.aggregation:token_mean",
    "sequence_mean": f"{HERE}.aggregation:sequence_mean",
    "sequence_sum": f"{HERE}.aggregation:SequenceSum",
}


class Make(Protocol):
    """A factory; rows for KL estimators and aggregations name the function itself."""

    def __call__(self, arguments: AlgorithmArguments) -> Any: ...


# All of these raise ConfigurationError.
def advantage_estimator(arguments: AlgorithmArguments) -> AdvantageEstimator:
    """Make the rollout side's estimator (``--advantage-estimator``)."""
    path = _row(ADVANTAGE_ESTIMATORS, arguments.advantage_estimator)
    return _made(path, AdvantageEstimator, "--advantage-estimator", arguments)


def token_advantages(arguments: AlgorithmArguments) -> TokenAdvantages | None:
    """Make the trainer's estimator (``--token-advantages``), if any."""
    if arguments.token_advantages is None:
        return None
    flag, name = "--token-advantages", arguments.token_advantages
    made = _made(_row(TOKEN_ADVANTAGES, name), TokenAdvantages, flag, arguments)
    _check_needs(made, f"{flag} {name}", arguments)
    return made


def critic_advantages(arguments: AlgorithmArguments) -> TokenAdvantages | None:
    """Make the estimator of the critic's returns, if it differs from the policy's (``--critic-lambd``)."""
    if arguments.critic_lambd is None:
        return None
    return token_advantages(replace(arguments, lambd=arguments.critic_lambd, lambd_length_alpha=None))


def policy_loss(arguments: AlgorithmArguments) -> PolicyLoss:
    """``--policy-loss``, or the loss of ``--loss-type sft_loss``."""
    if arguments.supervised:
        return _made(SFT_LOSS, PolicyLoss, "--loss-type", arguments)
    return _checked(POLICY_LOSSES, PolicyLoss, "--policy-loss", arguments.policy_loss, arguments)


def corrections(arguments: AlgorithmArguments) -> tuple[Correction, ...]:
    """Make the corrections of ``--use-tis``, ``--use-rs``, ``--use-opsm`` and by age; any number of them."""
    others = switched(SWITCHED, Correction, arguments)
    if not arguments.use_tis:
        return others
    return _checked(CORRECTIONS, Correction, "--tis-mode", arguments.tis_mode, arguments), *others


def kl_estimator(arguments: AlgorithmArguments) -> KlEstimator | None:
    """``--kl-loss-type``, with ``--use-kl-loss``."""
    if not arguments.use_kl_loss:
        return None
    return load_object(_row(KL_ESTIMATORS, arguments.kl_loss_type), KlEstimator, "--kl-loss-type")


def reward_kl_estimator(arguments: AlgorithmArguments) -> KlEstimator:
    """``--kl-reward-type``, for ``--token-advantages`` kl_in_reward and gae."""
    return load_object(_row(KL_ESTIMATORS, arguments.kl_reward_type), KlEstimator, "--kl-reward-type")


def aggregation(arguments: AlgorithmArguments) -> Aggregation:
    """``--loss-aggregation``."""
    path, flag = _row(AGGREGATIONS, arguments.loss_aggregation), "--loss-aggregation"
    if arguments.loss_aggregation == "sequence_sum":  # the only one that reads a flag
        return _made(path, Aggregation, flag, arguments)
    return load_object(path, Aggregation, flag)


def check_own(arguments: AlgorithmArguments) -> None:
    """Make every part from user code, to check it at the start."""
    makers = (
        (arguments.advantage_estimator, advantage_estimator),
        (arguments.token_advantages, token_advantages),
        (arguments.policy_loss, policy_loss),
        (arguments.tis_mode, corrections),
        (arguments.kl_loss_type, kl_estimator),
        (arguments.loss_aggregation, aggregation),
    )
    for name, make in makers:
        if name is not None and ":" in name:
            make(arguments)


def own_need_critic(arguments: AlgorithmArguments) -> bool:
    """Return whether ``--token-advantages``, which come from user code, need a critic."""
    made = token_advantages(arguments)
    return made is not None and "values" in made.needs


def switched[Part](rows: Switched, kind: type[Part], arguments: AlgorithmArguments) -> tuple[Part, ...]:
    """Make the parts that the flags ask for, in the order of the rows."""
    return tuple(_made(path, kind, flag, arguments) for flag, on, path in rows if on(arguments))


def _made[Part](path: str, kind: type[Part], flag: str, arguments: AlgorithmArguments) -> Part:
    part: Part = load_factory(path, Make, kind, flag)(arguments)
    return part


def _checked[LossPart: (PolicyLoss, Correction)](
    rows: Mapping[str, str], kind: type[LossPart], flag: str, name: str, arguments: AlgorithmArguments
) -> LossPart:
    made = _made(_row(rows, name), kind, flag, arguments)
    _check_needs(made, f"{flag} {name}", arguments)
    _check_critic(made, f"{flag} {name}", arguments)
    return made


def _row(rows: Mapping[str, str], name: str) -> str:
    return rows.get(name, name)


def _check_needs(part: TokenAdvantages | PolicyLoss | Correction, named: str, arguments: AlgorithmArguments) -> None:
    needs = getattr(part, "needs", None)  # a user's part may lack it
    if not isinstance(needs, Collection) or isinstance(needs, str) or not set(needs) <= set(get_args(Need)):
        raise ConfigurationError(
            f"{named}: expected `needs`, a tuple of any of {', '.join(get_args(Need))}, or (); found {needs!r}"
        )
    if "surveyed" in needs and not hasattr(part, "survey"):
        raise ConfigurationError(f"{named} needs surveyed, which only a --policy-loss with a method `survey` has")
    if "teacher_logprobs" in needs and not arguments.use_opd:
        raise ConfigurationError(f"{named} needs teacher_logprobs, which take a teacher: add --use-opd")


def _check_critic(part: PolicyLoss | Correction, named: str, arguments: AlgorithmArguments) -> None:
    """A critic learns advantages plus values: unless values are subtracted from advantages, they would only rise."""
    if "values" not in part.needs:
        return
    estimator = token_advantages(arguments)
    if estimator is None or "values" not in estimator.needs:
        raise ConfigurationError(
            f"{named} needs values, and the critic learns from --token-advantages that need them, too: add gae"
        )
