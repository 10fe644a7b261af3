"""Make the two parts that decide what is trained, from flags, identically for a run, its replay and a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from miles_async.algorithms.advantages.overlong import with_length_penalty
from miles_async.algorithms.registry import advantage_estimator
from miles_async.arguments import Arguments, RolloutArguments, StalenessArguments
from miles_async.arguments.model_files import read_config
from miles_async.ledger.schedule import Record, RecordedPool
from miles_async.rollout.group_filters import named_filter
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.events import PoolObserver
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.train_data import work
from miles_async.train_data.batch_maker import BatchMaker, RecordBatch, Viewer


def make_pool(
    rollout: RolloutArguments,
    staleness: StalenessArguments,
    *,
    group_filter: Sequence[str] = (),
    observers: Sequence[PoolObserver] = (),
    record: Record | None = None,
) -> Pool:
    """Make the pool of a run of ``--num-rollout`` steps. ``group_filter``: ``--group-filter``, which is asked again
    about groups that lost samples. ``record`` is called with every call and its decisions.
    """
    policy = StalenessPolicy.from_arguments(staleness, rollout)
    retries = RetryPolicy(
        max_prompt_attempts=rollout.max_prompt_attempts,
        max_quarantined_prompts=rollout.max_quarantined_prompts,
        recycle_stale=staleness.stale_group_action == "recycle",
    )
    total_groups = rollout.num_rollout * rollout.rollout_batch_size
    kind = Pool if record is None else partial(RecordedPool, record=record)
    return kind(
        policy, retries, total_groups=total_groups, group_filter=named_filter(group_filter), observers=observers
    )


def make_batches(
    arguments: Arguments,
    *,
    quadratic_work: float = 0.0,
    record: RecordBatch | None = None,
    viewer: Viewer | None = None,
) -> BatchMaker:
    """Make batches for the trainer that the flags describe. ``quadratic_work``: see ``train_data.work``."""
    return BatchMaker(
        estimator=with_length_penalty(
            advantage_estimator(arguments.algorithm), arguments.algorithm, arguments.rollout.rollout_max_response_len
        ),
        dp_size=arguments.data_parallel_size,
        max_tokens=arguments.micro_batch_tokens,
        quadratic_work=quadratic_work,
        share_prefixes=arguments.model.share_prefixes,
        optimizer_steps=arguments.optimizer_steps_per_epoch,
        bound=arguments.staleness.bound,
        with_experts=arguments.algorithm.routing_replay == "rollout",
        with_teacher=arguments.algorithm.use_opd,
        record=record,
        viewer=viewer,
    )


def quadratic_work_of(arguments: Arguments) -> float:
    return work.quadratic_work(read_config(arguments.model.directory))
