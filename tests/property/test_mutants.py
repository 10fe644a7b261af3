"""Are the property tests worth their name? Each mutant is a mistake that async RL systems really make.

It is put into the code under test, and the property that guards against it must fail, at the place where a user would
be harmed. The same procedure on the code as it is finds nothing.

# covers: C1, C4, C12, M1, M2, M3, O4
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from unittest import mock

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from miles_async.algorithms import mismatch
from miles_async.algorithms.losses import ppo_clip
from miles_async.algorithms.sequences import loss_tokens as loss_counts
from miles_async.algorithms.sequences import sum_of_loss_tokens
from miles_async.algorithms.step_scale import StepScale
from miles_async.api import TokenBatch
from miles_async.backends.megatron import metrics
from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.staleness import policy, versions
from miles_async.staleness.admission import Admission
from miles_async.staleness.buffer import StalenessBuffer
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.train_data import balance, work
from miles_async.types import NO_VERSION, Branch, samples
from tests.property import test_property_balance as balance_properties
from tests.property import test_property_losses as loss_properties
from tests.property import test_property_pool as pool_properties
from tests.property import test_property_sample_size as sample_size_properties
from tests.property import test_property_versions as version_properties
from tests.property.builders import make_sample

SEEDS = st.integers(0, 2**32 - 1)
REPRODUCIBLE = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a failure is all that is asked for, not the smallest
    suppress_health_check=list(HealthCheck),
)


# ------------------------------------------------------------------------------------------------- the properties
def _again(test: Any, *strategies: st.SearchStrategy[Any], max_examples: int = 60) -> Callable[[], None]:
    """A property test of another file, with reproducible examples."""
    return settings(REPRODUCIBLE, max_examples=max_examples)(given(*strategies)(test.hypothesis.inner_test))


def anything_in_any_order() -> None:
    run_state_machine_as_test(pool_properties.PoolMachine, settings=REPRODUCIBLE)


long_runs = _again(pool_properties.test_long_runs_with_stragglers, pool_properties.WORLDS, SEEDS, max_examples=120)
lossy_runs = _again(pool_properties.test_long_runs_with_stragglers, pool_properties.LOSSY, SEEDS)
in_order = _again(pool_properties.test_nothing_is_swept_when_groups_finish_in_order, pool_properties.WORLDS, SEEDS)
off_by_tokens_in_flight = _again(
    version_properties.test_every_start_and_end_wrong_by_the_tokens_in_flight_at_most,
    version_properties.true_versions(),
    version_properties.TOKENS_IN_FLIGHT,
    st.data(),
)
overlap_schedule = _again(
    version_properties.test_no_token_in_flight_is_called_fresher_than_it_is,
    version_properties.TOKENS_IN_FLIGHT,
    st.data(),
    max_examples=200,
)
with_a_hole = _again(
    version_properties.test_report_with_a_hole_falls_back_to_the_oldest_version_in_sight,
    version_properties.true_versions(),
    st.data(),
)

surrogate = _again(
    loss_properties.test_surrogate_and_gradient_equal_the_formula,
    loss_properties.TOKENS,
    st.just(0.2),
    st.just(0.28),
    st.just(3.0),
)
sample_size = _again(
    sample_size_properties.test_the_share_of_an_optimizer_step_is_that_of_its_sequences,
    sample_size_properties.STEPS,
    sample_size_properties.LONG_WAY,
    sample_size_properties.MASKED,
    st.sampled_from([1.0, 0.5]),
)
within_1_percent = _again(
    balance_properties.test_work_is_within_1_percent_of_the_mean_with_a_dozen_sequences_per_rank,
    SEEDS,
    st.integers(2, 8),
    st.integers(12, 40),
    st.just(1 / 1000),
)
one_sequence_apart = _again(
    balance_properties.test_sharing_out_and_exchanges_leave_a_partition_and_differ_by_one_sequence_at_most,
    balance_properties.LENGTHS,
    balance_properties.RANKS,
    balance_properties.QUADRATIC,
    balance_properties.WAYS,
)
never_worse = _again(
    balance_properties.test_never_worse_than_packing_first,
    st.just([21, 1, 38, 27, 45, 50, 7, 39, 12]),
    st.just(3),
    st.just(73),
    st.just(0.0),
)


@REPRODUCIBLE
@given(st.integers(0, 4), st.none() | st.sampled_from(["default", ""]) | st.integers(-1, 4))
def label_only(dispatch: int, label: object) -> None:
    """A response without spans is no fresher than its label, nor than dispatch; without a label it is an error."""
    try:
        (span,) = versions.parse_spans(None, label, 6, dispatch)
    except VersionUnknownError:
        assert not isinstance(label, int) or label < 0
        return
    assert isinstance(label, int), f"no usable label ({label!r}), and yet version {span.version}"
    assert 0 <= span.version <= min(label, dispatch)


@REPRODUCIBLE
@given(st.lists(st.tuples(st.integers(NO_VERSION, 4), st.booleans()), min_size=1, max_size=6))
def loss_tokens(tokens: list[tuple[int, bool]]) -> None:
    """A sample has an age only if every token that carries loss has a version."""
    trained = [version for version, carries_loss in tokens if carries_loss]
    sample = msgspec.structs.replace(
        make_sample([version for version, _ in tokens], prompt_length=0),
        loss_mask=np.array([carries_loss for _, carries_loss in tokens], dtype=np.uint8),
    )
    try:
        oldest = versions.oldest_version(sample)
    except VersionUnknownError:
        assert not trained or NO_VERSION in trained
        return
    assert NO_VERSION not in trained
    assert oldest == min(trained)


@REPRODUCIBLE
@given(st.integers(-2, 4), st.integers(0, 4))
def known_age(oldest: int, target: int) -> None:
    """An age needs both versions."""
    try:
        age = policy.age(oldest, target)
    except (VersionUnknownError, ContractViolation):
        assert not 0 <= oldest <= target
        return
    assert age == sum(1 for _ in range(oldest, target))
    assert oldest >= 0, f"version {oldest} is unknown, and yet its age is {age}"


PROPERTIES = (
    *(anything_in_any_order, long_runs, lossy_runs, in_order, off_by_tokens_in_flight, overlap_schedule, with_a_hole),
    *(label_only, surrogate, sample_size, within_1_percent, one_sequence_apart, never_worse, loss_tokens, known_age),
)


# ---------------------------------------------------------------------------------------------------- mistakes
Function = Callable[..., Any]


@dataclass(frozen=True)
class InSource:
    """A mistake inside a function: the one node of its syntax tree that ``finds`` is replaced by ``change(node)``."""

    finds: Callable[[ast.AST], bool]
    change: Callable[[Any], ast.AST]

    def code(self, function: FunctionType) -> CodeType:
        """Compile the mutated function."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        found = [node for node in ast.walk(tree) if self.finds(node)]
        assert len(found) == 1, f"expected one place in {function.__qualname__} to mutate, found {len(found)}"
        mutated = ast.fix_missing_locations(_Replace(found[0], self.change).visit(tree))
        namespace = dict(function.__globals__)
        exec(compile(mutated, f"<mutant of {function.__qualname__}>", "exec"), namespace)
        code: CodeType = namespace[function.__name__].__code__
        return code


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, change: Callable[[Any], ast.AST]) -> None:
        self._target, self._change = target, change

    def visit(self, node: ast.AST) -> ast.AST:
        return self._change(node) if node is self._target else self.generic_visit(node)


def comparison(kind: type[ast.cmpop], other: ast.cmpop) -> InSource:
    """The function's only comparison by ``kind`` is by ``other``."""
    return InSource(
        lambda node: isinstance(node, ast.Compare) and isinstance(node.ops[0], kind),
        lambda node: ast.Compare(node.left, [other], node.comparators),
    )


def call_of(name: str, change: Callable[[ast.Call], ast.AST]) -> InSource:
    """The function's only call of ``name``, which is of Python or torch, is changed."""

    def finds(node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) else None
        return (isinstance(called, ast.Name) and called.id == name) or (
            isinstance(called, ast.Attribute) and called.attr == name
        )

    return InSource(finds, change)


def node_of(kind: type[ast.AST], change: Callable[[Any], ast.AST]) -> InSource:
    """The function's only node of ``kind`` is changed."""
    return InSource(lambda node: isinstance(node, kind), change)


ONE = ast.Constant(versions.ONE_STEP)


def _passed_to_mistake(*arguments: object, **options: object) -> object:
    return MISTAKE(*arguments, **options)  # type: ignore[name-defined]  # noqa: F821


def apply(mistake: InSource | Function, function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange the code of ``function``, so that whoever imported it has the mistake.

    A mistake that is a function is called instead: with the original, then its arguments.
    """
    assert isinstance(function, FunctionType)
    if isinstance(mistake, InSource):
        monkeypatch.setattr(function, "__code__", mistake.code(function))
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    monkeypatch.setitem(function.__globals__, "MISTAKE", partial(mistake, original))
    monkeypatch.setattr(function, "__defaults__", None)
    monkeypatch.setattr(function, "__kwdefaults__", None)
    monkeypatch.setattr(function, "__code__", _passed_to_mistake.__code__)


def _older_bound(original: Function, oldest: int, target: int, bound: int | None, *, by: int) -> object:
    return original(oldest, target, None if bound is None else bound + by)


def _judged_by_the_version_before(original: Function, buffer: StalenessBuffer, target: int) -> object:
    return original(buffer, max([0, target - 1, *(group.oldest_version for group in buffer)]))


def _whole_group_or_nothing(
    original: Function, pool: Pool, attempt_id: int, bounds: Mapping[int, int | None], target: int
) -> object:
    too_old = original(pool, attempt_id, bounds, target)
    if not too_old or len(too_old) == len(bounds):
        return too_old
    original(pool, attempt_id, {index: bounds[index] for index in too_old}, target)
    return frozenset(bounds)


def _slot_kept(original: Function, *arguments: object) -> object:
    with mock.patch.object(Admission, "leave"):
        return original(*arguments)


def _freed_when_trained(original: Function, admission: Admission, count: int, *, leads_to: int) -> None:
    original(admission, count, leads_to=leads_to)
    admission.release()


def _one_fresh_sample_is_enough(original: Function, buffer: object, *arguments: object, **options: object) -> None:
    fewest = options.pop("min_samples", None)
    original(buffer, *arguments, **options, min_samples=None if fewest is None else 1)


def _older_capacity(original: Function, knobs: StalenessPolicy) -> object:
    return original(replace(knobs, bound=None if knobs.bound is None else knobs.bound + 1))


def _version_at_dispatch(
    original: Function, spans: object, label: object, tokens: int, dispatch: int, *rest: object
) -> object:
    return original(spans, label if isinstance(label, int) else dispatch, tokens, dispatch, *rest)


def _unversioned_passed_over(original: Function, branch: Branch) -> object:
    known = branch.loss_mask * (branch.weight_versions != NO_VERSION)
    return original(msgspec.structs.replace(branch, loss_mask=known))


def _dual_clip(original: Function, loss: Tensor, advantages: Tensor, cap: float, *, most: Function) -> object:
    """``most``: (advantages, cap) → the bound of the loss."""
    return torch.minimum(loss, most(advantages, cap)), original(loss, advantages, cap)[1]


def _nothing_past_the_clip(original: Function, loss: Tensor, advantages: Tensor, cap: float) -> object:
    past = original(loss, advantages, cap)[1]
    return torch.where(past > 0, 0.0, loss), past


def _optimistic(original: Function, ratio: Tensor, bounded: Tensor, advantages: Tensor) -> object:
    return -torch.maximum(ratio * advantages, bounded * advantages), original(ratio, bounded, advantages)[1]


def _mean_token(original: Function, logprobs: Tensor, batch: TokenBatch) -> object:
    sums, counts = sum_of_loss_tokens((logprobs - batch.rollout_logprobs).double(), batch), loss_counts(batch)
    return mismatch.importance_log_sums(sums / counts.clamp(min=1), counts > 0)


def _above_one(original: Function, scale: StepScale, log_sums: Tensor) -> float:
    return float((mismatch.effective_sample_size(log_sums) / scale.full_share) ** scale.power)


# --------------------------------------------------------------------------------------------------- the mutants
class Mutant(NamedTuple):
    """``function`` with a ``mistake``; ``caught_by`` fails, and ``where``, by default its name, is on the traceback."""

    name: str
    function: Any
    mistake: InSource | Function
    caught_by: Any
    where: str = ""


MUTANTS = (
    Mutant("age K is stale", policy.is_stale, partial(_older_bound, by=-1), in_order),
    Mutant(
        "age K is stale: with K = 0 nothing is ever trained",
        policy.is_stale,
        comparison(ast.Gt, ast.GtE()),
        anything_in_any_order,
        "teardown",
    ),
    Mutant("age K + 1 is fresh", policy.is_stale, partial(_older_bound, by=1), long_runs, "start_training"),
    Mutant(
        "no sweep at the cut",
        StalenessBuffer._sweep,
        lambda original, buffer, target: ((), ()),
        long_runs,
        "start_training",
    ),
    # by what is visible then: trains at up to K + 1
    Mutant(
        "freshness judged when rollouts are collected",
        StalenessBuffer.cut,
        _judged_by_the_version_before,
        long_runs,
        "start_training",
    ),
    # what is in flight turns out too old later
    Mutant(
        "publication waits for buffered attempts only",
        Pool.count_stale,
        lambda original, pool, version: original(pool, version) - len(pool.in_doubt(version)),
        long_runs,
        "cut",
    ),
    Mutant(
        "aborted while it might be trained: age K",
        Pool.review,
        lambda original, pool, attempt_id, bounds, target: original(
            pool, attempt_id, {i: v and v - 1 for i, v in bounds.items()}, target
        ),
        long_runs,
        "review",
    ),
    Mutant(
        "aborted while it might be trained: nothing was certain",
        Pool.review,
        lambda original, pool, attempt_id, bounds, target: original(
            pool, attempt_id, {i: v or 0 for i, v in bounds.items()}, target
        ),
        long_runs,
        "review",
    ),
    Mutant(
        "aborted while the rest of its group might be trained",
        Pool.review,
        _whole_group_or_nothing,
        lossy_runs,
        "review",
    ),
    Mutant("an attempt that was aborted keeps its slot", Pool.review, _slot_kept, long_runs, "review"),
    Mutant(
        "a trimmed group keeps what is too old",
        StalenessBuffer._fresh_rest,
        lambda original, buffer, group, target: group if original(buffer, group, target) else None,
        lossy_runs,
        "start_training",
    ),
    Mutant(
        "any rest of a group is enough",
        StalenessBuffer.__init__,
        _one_fresh_sample_is_enough,
        lossy_runs,
        "start_training",
    ),
    Mutant("slots are free when trained, not when visible", Admission.trained, _freed_when_trained, in_order),
    Mutant("room for K + 2 batches", vars(StalenessPolicy)["capacity"].fget, _older_capacity, in_order),
    Mutant(
        "no tolerance at edges",
        versions._assign_edges,
        node_of(ast.BinOp, lambda node: node.left),
        off_by_tokens_in_flight,
        "assert_never_fresher",
    ),
    # speculative decoding, in place
    Mutant(
        "one token at an edge, whatever an engine has in flight",
        versions._assign_edges,
        node_of(ast.BinOp, lambda node: ast.BinOp(node.left, node.op, ONE)),
        overlap_schedule,
        "assert_never_fresher",
    ),
    Mutant(
        "one token at the start of a call, whatever an engine has in flight",
        versions._assign_edges,
        InSource(
            lambda node: isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare),
            lambda node: ast.IfExp(node.test, ONE, node.orelse),
        ),
        overlap_schedule,
        "assert_never_fresher",
    ),
    Mutant(
        "unbelievable spans count as the newest version",
        versions.parse_spans,
        call_of("min", lambda node: ast.Call(ast.Name("max", ast.Load()), node.args, [])),
        with_a_hole,
    ),
    Mutant(
        "unbelievable spans count as the version at dispatch",
        versions.parse_spans,
        call_of("min", lambda node: node.args[0]),
        label_only,
    ),
    Mutant("no label counts as the version at dispatch", versions.parse_spans, _version_at_dispatch, label_only),
    Mutant(
        "loss tokens without a version are passed over", Branch.loss_versions, _unversioned_passed_over, loss_tokens
    ),
    Mutant("loss tokens without a version have version -1", samples.known, comparison(ast.LtE, ast.Lt()), loss_tokens),
    Mutant("an unknown version has an age", policy.age, node_of(ast.BoolOp, lambda node: node.values[-1]), known_age),
    Mutant(
        "work is the number of tokens",
        work.sequence_work,
        lambda original, lengths, quadratic: original(lengths, 0.0),
        within_1_percent,
    ),
    Mutant(
        "the heaviest parts are united with the heaviest",
        balance.largest_differencing,
        node_of(ast.Slice, lambda node: ast.Slice()),
        one_sequence_apart,
    ),
    Mutant(
        "the heaviest part gets the next sequence",
        balance.longest_first,
        node_of(ast.BinOp, lambda node: ast.BinOp(node.left, ast.Sub(), node.right)),
        one_sequence_apart,
    ),
    Mutant(
        "packing first is never looked at",
        balance.lightest,
        call_of("min", lambda node: ast.Subscript(node.args[0], ast.Constant(0), ast.Load())),
        never_worse,
    ),
    Mutant(
        "dual clip of positive advantages",
        ppo_clip.dual_clip,
        partial(_dual_clip, most=lambda advantages, cap: torch.where(advantages > 0, -cap * advantages, torch.inf)),
        surrogate,
    ),
    Mutant(
        "dual clip of the ratio, not of the loss",
        ppo_clip.dual_clip,
        partial(_dual_clip, most=lambda advantages, cap: torch.where(advantages < 0, cap, torch.inf)),
        surrogate,
    ),
    Mutant("a token past the dual clip counts for nothing", ppo_clip.dual_clip, _nothing_past_the_clip, surrogate),
    Mutant(
        "no dual clip",
        ppo_clip.dual_clip,
        partial(_dual_clip, most=lambda advantages, cap: torch.tensor(torch.inf)),
        surrogate,
    ),
    Mutant("the clip is optimistic", ppo_clip.clipped_surrogate, _optimistic, surrogate),
    Mutant(
        "the clip ignores clip-higher",
        ppo_clip.ClipRange.bounded,
        lambda original, clip, ratio: ratio.clamp(clip.low, 2 - clip.low),
        surrogate,
    ),
    Mutant(
        "weights far below 1 are all alike",
        mismatch.importance_log_sums,
        lambda original, logs, mask: original(logs.double().clamp(min=-300.0), mask),
        sample_size,
    ),
    Mutant(
        "weights far above 1 are all alike",
        mismatch.importance_log_sums,
        lambda original, logs, mask: original(logs.double().clamp(max=20.0), mask),
        sample_size,
    ),
    Mutant(
        "sequences without loss count as on-policy",
        mismatch.sequence_importance_log_sums,
        comparison(ast.Gt, ast.GtE()),
        sample_size,
    ),
    Mutant("a sequence weighs as its mean token", mismatch.sequence_importance_log_sums, _mean_token, sample_size),
    Mutant(
        "a share of 1 is asked for, whatever the flag",
        StepScale.factor,
        lambda original, scale, log_sums: original(replace(scale, full_share=1.0), log_sums),
        sample_size,
    ),
    Mutant("the factor goes above 1", StepScale.factor, _above_one, sample_size),
    Mutant(
        "logs of sums are added",
        metrics.accumulate,
        call_of("logaddexp", lambda node: ast.BinOp(node.args[0], ast.Add(), node.args[1])),
        sample_size,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(mutant.mistake, mutant.function, monkeypatch)
    with pytest.raises((AssertionError, ContractViolation)) as caught:
        mutant.caught_by()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (mutant.where or mutant.caught_by.__name__) in frames, f"it failed elsewhere: {frames}"


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_code_as_it_is_passes_the_same_procedure(check: Callable[[], None]) -> None:
    check()


def test_every_property_catches_a_mutant() -> None:
    assert {mutant.caught_by for mutant in MUTANTS} == set(PROPERTIES)
