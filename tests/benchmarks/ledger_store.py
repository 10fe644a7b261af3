"""Attempts per second that the ledger on disk takes, in batches as ``ledger.writer`` writes them.

Every attempt is issued, finished, cut and trained, or swept and issued again: whole lives, with the checks of C2 at
every cut. One row per tenth, to show that the rate does not fall as the ledger grows.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from miles_async.ledger.store import LedgerStore, TimedEvent
from miles_async.staleness.events import Checked, Cut, Ended, Finished, Issued
from miles_async.staleness.ledger import Outcome, Stage
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt, Prompt, Sample
from tests.benchmarks.report import Row

BATCH_SIZE = 128  # groups per rollout step
SAMPLES = 8
TOKENS = 512  # per sample
REQUIRED = 2_000  # attempts per second


def sample(versions: list[int]) -> Sample:
    weight_versions = np.sort(np.resize(np.array(versions, np.int32), TOKENS))
    return Sample(
        tokens=np.zeros(TOKENS, np.int32),
        prompt_length=0,
        loss_mask=np.ones(TOKENS, np.uint8),
        rollout_logprobs=np.zeros(TOKENS, np.float32),
        weight_versions=weight_versions,
        text="",
        finish_reason="stop",
        reward=0.5,
        metadata={"engines": ["engine-0"], "chunks": len(versions)},
    )


def lives(count: int) -> Iterator[list[TimedEvent]]:
    """All events of one rollout step at a time; three lists of events per step, as flushes would cut them."""
    chance = random.Random(0)
    next_id = 0
    for step in range(count // BATCH_SIZE):
        pure, mixed = sample([step]), sample([step, step + 1])
        attempts = [
            Attempt(
                attempt_id=attempt_id,
                prompt=Prompt(prompt_id=f"train.jsonl:{attempt_id}", token_ids=(), text=""),
                epoch=0,
                issued_version=step,
            )
            for attempt_id in range(next_id, next_id + BATCH_SIZE)
        ]
        next_id += BATCH_SIZE
        ids = [attempt.attempt_id for attempt in attempts]
        yield [(step, Issued(attempt=attempt)) for attempt in attempts]
        yield [
            (step, Finished(group=group_of(a, [mixed if chance.random() < 0.3 else pure] * SAMPLES))) for a in attempts
        ]
        stale = {i for i in ids if chance.random() < 0.05}
        fresh = tuple(i for i in ids if i not in stale)
        yield [
            *(
                (step, Ended(attempt_id=i, outcome=Outcome.STALE_RECYCLED, reason="age 3", target_version=step))
                for i in stale
            ),
            (step, Cut(attempt_ids=fresh, target_version=step + 1)),
            (step, Checked(issued=next_id, live=dict.fromkeys(fresh, Stage.CUT))),
            *((step, Ended(attempt_id=i, outcome=Outcome.TRAINED, step=step)) for i in fresh),
        ]


def rows(attempts: int = 100_000) -> Iterator[Row]:
    """One per tenth of the attempts."""
    tenth = max(1, attempts // BATCH_SIZE // 10)  # steps
    events = lives(10 * tenth * BATCH_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        store = LedgerStore(Path(directory) / "ledger.sqlite")
        for part in range(1, 11):
            batches = list(itertools.islice(events, 3 * tenth))
            started = time.perf_counter()
            for batch in batches:
                store.write(batch)
            seconds = time.perf_counter() - started
            done = tenth * BATCH_SIZE
            yield {
                "attempts": part * done,
                "attempts_per_second": round(done / seconds),
                "us_per_attempt": round(1e6 * seconds / done, 1),
                "bytes_per_attempt": round(sum(f.stat().st_size for f in Path(directory).iterdir()) / (part * done)),
                "meets_goal": done / seconds >= REQUIRED,
            }
        store.close()
