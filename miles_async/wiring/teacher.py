"""The teacher of on-policy distillation: engines of a frozen group."""

from __future__ import annotations

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import teacher_group
from miles_async.engines.scoring import EngineScorer
from miles_async.rollout.teacher import Teacher
from miles_async.runtime.services import Services
from miles_async.wiring.engines import RunEngines


def make_teacher(arguments: Arguments, engines: RunEngines, services: Services) -> Teacher | None:
    """The teacher of --use-opd. Raises ConfigurationError if no group is one."""
    if not arguments.algorithm.use_opd:
        return None
    group = teacher_group(arguments)
    stack = engines.frozen[group.name]
    score = EngineScorer(
        stack.server,
        stack.registry,
        timeout=arguments.rewards.reward_timeout,
        at_once=arguments.rollout.rollout_concurrency_per_engine * group.num_engines,
    )
    return Teacher(score, services.circuit(f"the teacher, [groups.{group.name}]"))
