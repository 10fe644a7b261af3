"""Are the property tests worth their name? Each mutant is a mistake that async RL systems really make.

It is put into the code under test, and the property that guards against it must fail, at the place where a user would
be harmed. The same procedure on the code as it is finds nothing.

# covers: C1, C4, C12, M1, M2, M3, O4
"""

from __future__ import annotations

import inspect
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from miles_async.algorithms import mismatch
from miles_async.algorithms.losses import ppo_clip
from miles_async.algorithms.step_scale import StepScale
from miles_async.backends.megatron import metrics
from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.staleness import policy, versions
from miles_async.staleness.admission import Admission
from miles_async.staleness.buffer import StalenessBuffer
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.train_data import balance, work
from miles_async.types import NO_VERSION
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
    balance_properties.test_differencing_and_exchanges_leave_a_partition_and_differ_by_one_sequence_at_most,
    balance_properties.LENGTHS,
    balance_properties.RANKS,
    balance_properties.QUADRATIC,
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


PROPERTIES = {
    "anything_in_any_order": anything_in_any_order,
    "long_runs": long_runs,
    "lossy_runs": lossy_runs,
    "in_order": in_order,
    "off_by_tokens_in_flight": off_by_tokens_in_flight,
    "overlap_schedule": overlap_schedule,
    "with_a_hole": with_a_hole,
    "label_only": label_only,
    "surrogate": surrogate,
    "sample_size": sample_size,
    "within_1_percent": within_1_percent,
    "one_sequence_apart": one_sequence_apart,
    "never_worse": never_worse,
    "loss_tokens": loss_tokens,
    "known_age": known_age,
}


# --------------------------------------------------------------------------------------------------- the mutants
@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``function`` with ``old`` replaced by ``new``; ``caught_by`` fails, and ``where`` is on the traceback."""

    name: str
    function: Any
    old: str
    new: str
    caught_by: Callable[[], None]
    where: str

    def code(self) -> Any:
        """The code object of the mutated function."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"mutant {self.name!r} no longer fits {self.function.__qualname__}"
        module = compile(source.replace(self.old, self.new), f"<mutant: {self.name}>", "exec")
        namespace = dict(self.function.__globals__)
        exec(module, namespace)
        mutated = namespace[self.function.__name__]
        return (mutated.fget if isinstance(mutated, property) else mutated).__code__


MUTANTS = (
    Mutant(
        name="age K is stale",
        function=policy.is_stale,
        old="versions_old > bound",
        new="versions_old >= bound",
        caught_by=in_order,
        where="test_nothing_is_swept_when_groups_finish_in_order",
    ),
    Mutant(
        name="age K is stale: with K = 0 nothing is ever trained",
        function=policy.is_stale,
        old="versions_old > bound",
        new="versions_old >= bound",
        caught_by=anything_in_any_order,
        where="teardown",
    ),
    Mutant(
        name="age K + 1 is fresh",
        function=policy.is_stale,
        old="versions_old > bound",
        new="versions_old > bound + 1",
        caught_by=long_runs,
        where="start_training",
    ),
    Mutant(
        name="no sweep at the cut",
        function=StalenessBuffer._sweep,
        old="while self._versions and",
        new="while False and",
        caught_by=long_runs,
        where="start_training",
    ),
    Mutant(
        name="freshness judged when rollouts are collected",  # by what is visible then: trains at up to K + 1
        function=Pool.cut,
        old="self._buffer.cut(target_version)",
        new="self._buffer.cut(max([self._visible_version, *(group.oldest_version for group in self._buffer)]))",
        caught_by=long_runs,
        where="start_training",
    ),
    Mutant(
        name="publication waits for buffered attempts only",  # what is in flight turns out too old later
        function=Pool.count_stale,
        old="+ len(self.in_doubt(version))",
        new="",
        caught_by=long_runs,
        where="cut",
    ),
    Mutant(
        name="aborted while it might be trained: age K",
        function=Pool.review,
        old="is_stale(version, target_version, bound)",
        new="is_stale(version, target_version + 1, bound)",
        caught_by=long_runs,
        where="review",
    ),
    Mutant(
        name="aborted while it might be trained: nothing was certain",
        function=Pool.review,
        old="known.items() if is_stale",
        new="{**dict.fromkeys(versions, 0), **known}.items() if is_stale",
        caught_by=long_runs,
        where="review",
    ),
    Mutant(
        name="aborted while the rest of its group might be trained",
        function=Pool.review,
        old="self._policy.min_samples or len(versions)",
        new="len(versions)",
        caught_by=lossy_runs,
        where="review",
    ),
    Mutant(
        name="an attempt that was aborted keeps its slot",
        function=Pool.review,
        old="self._end_untrained(",
        new="self._admission.resume(1); self._end_untrained(",
        caught_by=long_runs,
        where="review",
    ),
    Mutant(
        name="a trimmed group keeps what is too old",
        function=StalenessBuffer._fresh_rest,
        old="if not is_stale(oldest_version(sample), target_version, self._bound)",
        new="",
        caught_by=lossy_runs,
        where="start_training",
    ),
    Mutant(
        name="any rest of a group is enough",
        function=StalenessBuffer._fresh_rest,
        old="not fresh or len(fresh) < self._min_samples",
        new="not fresh",
        caught_by=lossy_runs,
        where="start_training",
    ),
    Mutant(
        name="slots are free when trained, not when visible",
        function=Admission.trained,
        old="self._trained[leads_to] = self._trained.get(leads_to, 0) + count",
        new="pass",
        caught_by=in_order,
        where="test_nothing_is_swept_when_groups_finish_in_order",
    ),
    Mutant(
        name="room for K + 2 batches",
        function=vars(StalenessPolicy)["capacity"].fget,
        old="self.bound + 1",
        new="self.bound + 2",
        caught_by=in_order,
        where="test_nothing_is_swept_when_groups_finish_in_order",
    ),
    Mutant(
        name="no tolerance at edges",
        function=versions._assign_edges,
        old="max(before.end, after.start) + tolerance",
        new="max(before.end, after.start)",
        caught_by=off_by_tokens_in_flight,
        where="assert_never_fresher",
    ),
    Mutant(
        name="one token at an edge, whatever an engine has in flight",  # speculative decoding, in place
        function=versions._assign_edges,
        old="max(before.end, after.start) + tolerance",
        new="max(before.end, after.start) + ONE_STEP",
        caught_by=overlap_schedule,
        where="assert_never_fresher",
    ),
    Mutant(
        name="one token at the start of a call, whatever an engine has in flight",
        function=versions._assign_edges,
        old="tolerance if spans[0].version > dispatched else 0",
        new="ONE_STEP if spans[0].version > dispatched else 0",
        caught_by=overlap_schedule,
        where="assert_never_fresher",
    ),
    Mutant(
        name="unbelievable spans count as the newest version",
        function=versions.parse_spans,
        old="min(dispatched, *versions)",
        new="max(dispatched, *versions)",
        caught_by=with_a_hole,
        where="test_report_with_a_hole_falls_back_to_the_oldest_version_in_sight",
    ),
    Mutant(
        name="unbelievable spans count as the version at dispatch",
        function=versions.parse_spans,
        old="min(dispatched, *versions)",
        new="dispatched",
        caught_by=label_only,
        where="label_only",
    ),
    Mutant(
        name="no label counts as the version at dispatch",
        function=versions.parse_spans,
        old='_parse_version(reported_scalar, "weight_version", newest_possible)',
        new="int(reported_scalar) if isinstance(reported_scalar, int) else dispatched",
        caught_by=label_only,
        where="label_only",
    ),
    Mutant(
        name="loss tokens without a version are passed over",
        function=versions.branch_versions,
        old="[branch.loss_mask != 0]",
        new="[(branch.loss_mask != 0) & (branch.weight_versions != NO_VERSION)]",
        caught_by=loss_tokens,
        where="loss_tokens",
    ),
    Mutant(
        name="loss tokens without a version have version -1",
        function=versions.branch_versions,
        old="versions.min() <= NO_VERSION",
        new="versions.min() < NO_VERSION",
        caught_by=loss_tokens,
        where="loss_tokens",
    ),
    Mutant(
        name="an unknown version has an age",
        function=policy.age,
        old="oldest_version < 0 or target_version < 0",
        new="target_version < 0",
        caught_by=known_age,
        where="known_age",
    ),
    Mutant(
        name="work is the number of tokens",
        function=work.sequence_work,
        old="tokens + quadratic * tokens**2",
        new="tokens",
        caught_by=within_1_percent,
        where="test_work_is_within_1_percent_of_the_mean_with_a_dozen_sequences_per_rank",
    ),
    Mutant(
        name="the heaviest parts are united with the heaviest",
        function=balance.largest_differencing,
        old="sums.pop(second)[::-1]",
        new="sums.pop(second)",
        caught_by=one_sequence_apart,
        where="test_differencing_and_exchanges_leave_a_partition_and_differ_by_one_sequence_at_most",
    ),
    Mutant(
        name="packing first is never looked at",
        function=balance.balance,
        old="min(plans, key=cost)",
        new="plans[0]",
        caught_by=never_worse,
        where="test_never_worse_than_packing_first",
    ),
    Mutant(
        name="dual clip of positive advantages",
        function=ppo_clip.dual_clip,
        old="advantages < 0, cap * advantages.abs()",
        new="advantages > 0, -cap * advantages",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="dual clip of the ratio, not of the loss",
        function=ppo_clip.dual_clip,
        old="cap * advantages.abs()",
        new="cap",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="a token past the dual clip counts for nothing",
        function=ppo_clip.dual_clip,
        old="torch.minimum(loss, most)",
        new="torch.where(loss > most, 0.0, loss)",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="no dual clip",
        function=ppo_clip.dual_clip,
        old="torch.minimum(loss, most)",
        new="loss",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="the clip is optimistic",
        function=ppo_clip.clipped_surrogate,
        old="torch.minimum(plain, clipped)",
        new="torch.maximum(plain, clipped)",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="the clip ignores clip-higher",
        function=ppo_clip.ClipRange.bounded,
        old="ratio.clamp(self.low, self.high)",
        new="ratio.clamp(self.low, 2 - self.low)",
        caught_by=surrogate,
        where="test_surrogate_and_gradient_equal_the_formula",
    ),
    Mutant(
        name="weights far below 1 are all alike",
        function=mismatch.importance_log_sums,
        old="log_weights.double()",
        new="log_weights.double().clamp(min=-300.0)",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="weights far above 1 are all alike",
        function=mismatch.importance_log_sums,
        old="log_weights.double()",
        new="log_weights.double().clamp(max=20.0)",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="sequences without loss count as on-policy",
        function=mismatch.sequence_importance_log_sums,
        old="loss_tokens(batch) > 0",
        new="loss_tokens(batch) >= 0",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="a sequence weighs as its mean token",
        function=mismatch.sequence_importance_log_sums,
        old="sum_of_loss_tokens(log_ratio, batch)",
        new="sum_of_loss_tokens(log_ratio, batch) / loss_tokens(batch).clamp(min=1)",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="a share of 1 is asked for, whatever the flag",
        function=StepScale.factor,
        old=" / self.full_share",
        new="",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="the factor goes above 1",
        function=StepScale.factor,
        old="min(1.0, effective_sample_size(log_sums) / self.full_share)",
        new="(effective_sample_size(log_sums) / self.full_share)",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
    Mutant(
        name="logs of sums are added",
        function=metrics.accumulate,
        old="torch.logaddexp(totals[name], value)",
        new="totals[name] + value",
        caught_by=sample_size,
        where="test_the_share_of_an_optimizer_step_is_that_of_its_sequences",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(mutant.function, FunctionType)
    monkeypatch.setattr(mutant.function, "__code__", mutant.code())  # whoever imported the function has the mutant
    with pytest.raises((AssertionError, ContractViolation)) as caught:
        mutant.caught_by()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert mutant.where in frames, f"it failed elsewhere: {frames}"


@pytest.mark.parametrize("name", PROPERTIES)
def test_code_as_it_is_passes_the_same_procedure(name: str) -> None:
    PROPERTIES[name]()


def test_every_property_catches_a_mutant() -> None:
    assert {mutant.caught_by for mutant in MUTANTS} == set(PROPERTIES.values())
