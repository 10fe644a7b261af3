"""Rows for every choice of a flag, checks of users' own parts at the start, and the examples of docstrings."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_async import api
from miles_async.algorithms import registry
from miles_async.algorithms.objective import make_objective
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.specification import flag_specifications
from miles_async.errors import ConfigurationError, ContractViolation
from miles_async.staleness.versions import group_of
from tests.fakes.token_batches import token_batch
from tests.property.builders import make_attempt, make_sample

ROWS = {
    "advantage_estimator": registry.ADVANTAGE_ESTIMATORS,
    "token_advantages": registry.TOKEN_ADVANTAGES,
    "policy_loss": registry.POLICY_LOSSES,
    "tis_mode": registry.CORRECTIONS,
    "kl_loss_type": registry.KL_ESTIMATORS,
    "kl_reward_type": registry.KL_ESTIMATORS,
    "loss_aggregation": registry.AGGREGATIONS,
}
MAKERS = {
    "advantage_estimator": registry.advantage_estimator,
    "token_advantages": registry.token_advantages,
    "policy_loss": registry.policy_loss,
    "tis_mode": registry.corrections,
    "kl_loss_type": registry.kl_estimator,
    "kl_reward_type": registry.reward_kl_estimator,
    "loss_aggregation": registry.aggregation,
}


def with_flags(**flags: object) -> AlgorithmArguments:
    return AlgorithmArguments(use_tis=True, use_kl_loss=True, **flags)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put code into the module ``own_algorithms``."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str) -> None:
        monkeypatch.delitem(__import__("sys").modules, "own_algorithms", raising=False)
        (tmp_path / "own_algorithms.py").write_text(code)

    return write


@pytest.mark.parametrize("flag", ROWS)
def test_every_choice_of_a_flag_has_a_row_that_can_be_made(flag: str) -> None:
    specification = flag_specifications()[flag]
    assert tuple(ROWS[flag]) == specification.choices
    assert specification.or_path
    for name in ROWS[flag]:
        assert MAKERS[flag](with_flags(**{flag: name})) is not None


def test_parts_that_are_off_are_not_made() -> None:
    plain = AlgorithmArguments()
    assert registry.token_advantages(plain) is None
    assert registry.corrections(plain) == ()
    assert registry.kl_estimator(plain) is None


def examples() -> Mapping[str, str]:
    """Protocol → the code in its docstring."""
    found = {name: doctest.DocTestParser().get_examples(getattr(api, name).__doc__ or "") for name in dir(api)}
    return {name: "".join(example.source for example in parts) for name, parts in found.items() if parts}


@pytest.mark.parametrize(
    ("protocol", "flag", "attribute"),
    [
        ("AdvantageEstimator", "advantage_estimator", "MeanBaseline"),
        ("TokenAdvantages", "token_advantages", "Discounted"),
        ("PolicyLoss", "policy_loss", "Tapered"),
        ("Correction", "tis_mode", "Masked"),
        ("KlEstimator", "kl_loss_type", "squared"),
        ("Aggregation", "loss_aggregation", "mean_over_tokens"),
    ],
)
def test_the_example_of_each_protocol_can_be_trained_with(
    own: Callable[[str], None], protocol: str, flag: str, attribute: str
) -> None:
    own(f"import numpy as np\nimport torch\n\n{examples()[protocol]}")
    arguments = with_flags(kl_loss_coef=0.1, **{flag: f"own_algorithms:{attribute}"})
    registry.check_own(arguments)
    group = group_of(make_attempt(), [make_sample([0], reward=2.0), make_sample([0], reward=0.0)])
    assert registry.advantage_estimator(arguments)([group]).dtype == np.float32
    objective = make_objective(arguments)
    batch = token_batch(
        old=[-1.0, -2.0, -1.0], rollout=[-2.5, -2.0, -1.0], advantages=[1.0, 1.0, -1.0], mask=[1.0, 1.0, 0.0],
        lengths=[2, 1], ref_logprobs=[-1.0, -1.5, -1.0],
    )  # fmt: skip
    assert objective.advantages(batch).tolist() == pytest.approx(
        [0.999, 1.0, 0.0] if flag == "token_advantages" else [1.0, 1.0, -1.0]
    )
    logprobs = batch.old_logprobs.clone().requires_grad_()
    sums = objective(logprobs, batch)
    sums.loss.backward()
    assert (logprobs.grad != 0).tolist() == [flag != "tis_mode", True, False]  # exp(1.5) is masked
    assert sums.count == 2


def test_a_loss_of_users_sees_no_more_than_it_asked_for(own: Callable[[str], None]) -> None:
    own(
        "class Greedy:\n    needs = ()\n    def __init__(self, arguments): ...\n"
        "    def __call__(self, logprobs, batch): return -logprobs * batch.ref_logprobs, {}\n"
    )
    objective = make_objective(AlgorithmArguments(policy_loss="own_algorithms:Greedy"))
    with pytest.raises(ContractViolation, match=r"reads ref_logprobs.* expected 'ref_logprobs' in its `needs`"):
        objective(torch.zeros(1), token_batch(old=[0.0], advantages=[1.0]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def Own(): ...", r"it must take \(arguments\)"),
        ("class Own:\n    def __init__(self, arguments): ...", "it cannot be called"),
        (
            "class Own:\n    def __init__(self, arguments): ...\n    def __call__(self, logprobs, batch): ...",
            "expected `needs`, a tuple of any of old_logprobs, ref_logprobs, teacher_logprobs, .*, or .* found None",
        ),
        (
            "class Own:\n    needs = ('logits',)\n    def __init__(self, arguments): ...\n"
            "    def __call__(self, logprobs, batch): ...",
            r"expected `needs`.* found \('logits',\)",
        ),
        (
            "class Own:\n    needs = ('values',)\n    def __init__(self, arguments): ...\n"
            "    def __call__(self, logprobs, batch): ...",
            "needs values, and the critic learns from --token-advantages that need them, too: add gae",
        ),
        (
            "class Own:\n    needs = ('teacher_logprobs',)\n    def __init__(self, arguments): ...\n"
            "    def __call__(self, logprobs, batch): ...",
            "needs teacher_logprobs, which take a teacher: add --use-opd",
        ),
    ],
)
def test_unusable_parts_are_refused_at_the_start(own: Callable[[str], None], body: str, message: str) -> None:
    own(body)
    with pytest.raises(ConfigurationError, match=f"--policy-loss own_algorithms:Own.*{message}"):
        registry.check_own(AlgorithmArguments(policy_loss="own_algorithms:Own"))


@pytest.mark.parametrize(
    ("flag", "returned"),
    [("policy_loss", "logprobs.sum(), {}"), ("tis_mode", "batch.rewards, {}"), ("token_advantages", "batch.rewards")],
)
def test_one_number_for_all_tokens_is_an_error(own: Callable[[str], None], flag: str, returned: str) -> None:
    """It would broadcast, and train something else."""
    takes = "batch" if flag == "token_advantages" else "logprobs, batch"
    own(
        "class Own:\n    needs = ()\n    def __init__(self, arguments): ...\n"
        f"    def __call__(self, {takes}): return {returned}\n"
    )
    objective = make_objective(AlgorithmArguments(use_tis=True, **{flag: "own_algorithms:Own"}))
    batch = token_batch(old=[0.0, 0.0], advantages=[1.0, 1.0])
    found = r"\[\]" if flag == "policy_loss" else r"\[1\]"
    with pytest.raises(ContractViolation, match=rf"--{flag.replace('_', '-')}: expected .* shape \[2\], found {found}"):
        objective(torch.zeros(2), token_batch(old=[0.0, 0.0], advantages=objective.advantages(batch).tolist()))
