"""What the bookkeeping of attempts costs: admission, buffer, ledger and attempt book, as the pool moves them together.

Whole lives of groups: admitted, finished in any order, cut or swept, trained, their slots given back, with the checks
of C2 at every cut. By samples that the pool holds at once (as many as the lead admits) and by engines, which is how far
the order of finishing is from that of admission.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from miles_async.arguments import RolloutArguments, StalenessArguments
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.types import Attempt, Group, Prompt
from tests.benchmarks.report import Row

BOUND = 2
SAMPLES = 8  # per group
SLOTS = 8  # per engine
PROMPT = Prompt(prompt_id="p", token_ids=(1,), text="")
STEPS = 10


def measure(samples_held: int, engines: int) -> Row:
    batch = samples_held // SAMPLES // (BOUND + 1)
    in_flight = engines * SLOTS // SAMPLES
    pool = Pool(
        StalenessPolicy.from_arguments(
            StalenessArguments(max_weight_staleness=BOUND),
            RolloutArguments(rollout_batch_size=batch, n_samples_per_prompt=SAMPLES),
        ),
        RetryPolicy(max_prompt_attempts=4, max_quarantined_prompts=1, recycle_stale=True),
    )
    chance, running, version = random.Random(0), list[Attempt](), 0
    started = time.process_time()
    pool.commit(version)
    while version < STEPS:
        while len(running) < in_flight and pool.room():
            if pool.needs_prompt():
                pool.offer(0, PROMPT)
            running.append(pool.issue(version))
        if running:
            index = chance.randrange(len(running))
            running[index], running[-1] = running[-1], running[index]
            pool.finished(finished(running.pop(), version))
        if groups := pool.cut(version):  # as the dispatcher, who asks whenever a group is finished
            pool.trained(groups, version)
            version += 1
            pool.commit(version)
    seconds = time.process_time() - started
    return {
        "samples_held": samples_held,
        "engines": engines,
        "groups_trained": STEPS * batch,
        "groups_swept": pool.balance().summary()["recycled"],
        "cpu_us_per_group": round(1e6 * seconds / (STEPS * batch), 2),
        "cpu_us_per_sample": round(1e6 * seconds / (STEPS * batch * SAMPLES), 2),
    }


def finished(attempt: Attempt, version: int) -> Group:
    samples: Any = (None,) * SAMPLES  # nothing here looks into them
    return Group(attempt=attempt, samples=samples, oldest_version=attempt.issued_version, newest_version=version)


def rows() -> Iterator[Row]:
    """Flat columns say that the cost doesn't depend on how much is held."""
    for samples_held in (1_000, 100_000, 1_000_000):
        for engines in (10, 100, 1000):
            yield measure(samples_held, engines)
