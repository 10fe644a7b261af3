"""Attempts per second that the ledger on disk takes, in batches as ``rollout.ledger_writer`` writes them. Run by hand.

    python -m tests.benchmarks.ledger_store [--attempts 100000]

Every attempt is issued, finished, cut and trained, or swept and issued again: whole lives, with the checks of C2 at
every cut. Prints one JSON object per tenth, to show that the rate does not fall as the ledger grows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from miles_async.staleness.ledger import Outcome, Stage
from miles_async.staleness.ledger_store import (
    CheckedEvent,
    CutEvent,
    EndedEvent,
    FinishedEvent,
    IssuedEvent,
    LedgerEvent,
    LedgerStore,
)
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt, Prompt, Sample

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


def lives(count: int) -> Iterator[list[LedgerEvent]]:
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
        yield [IssuedEvent(at=step, attempt=attempt) for attempt in attempts]
        yield [
            FinishedEvent(at=step, group=group_of(a, [mixed if chance.random() < 0.3 else pure] * SAMPLES))
            for a in attempts
        ]
        stale = {i for i in ids if chance.random() < 0.05}
        fresh = tuple(i for i in ids if i not in stale)
        yield [
            *(
                EndedEvent(at=step, attempt_id=i, outcome=Outcome.STALE_RECYCLED, reason="age 3", target_version=step)
                for i in stale
            ),
            CutEvent(at=step, attempt_ids=fresh, target_version=step + 1),
            CheckedEvent(at=step, issued=next_id, live=dict.fromkeys(fresh, Stage.CUT)),
            *(EndedEvent(at=step, attempt_id=i, outcome=Outcome.TRAINED, step=step) for i in fresh),
        ]


def measure(attempts: int) -> float:
    """Attempts per second, over all of them."""
    busy, part, done = 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        store = LedgerStore(path)
        for number, events in enumerate(lives(attempts), start=1):
            started = time.perf_counter()
            store.write(events)
            busy += time.perf_counter() - started
            if number % 3 == 0:
                done += BATCH_SIZE
            if number % 3 == 0 and (done // BATCH_SIZE) % max(1, attempts // BATCH_SIZE // 10) == 0:
                rate = max(1, attempts // BATCH_SIZE // 10) * BATCH_SIZE / (busy - part)
                print(json.dumps({"attempts": done, "attempts_per_second": round(rate)}), flush=True)
                part = busy
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        store.close()
    rate = done / busy
    print(
        json.dumps(
            {
                "attempts": done,
                "attempts_per_second": round(rate),
                "microseconds_per_attempt": round(1e6 / rate, 1),
                "bytes_per_attempt": round(size / done),
            }
        )
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=100_000)
    rate = measure(parser.parse_args().attempts)
    if rate < REQUIRED:
        raise SystemExit(f"expected at least {REQUIRED} attempts per second, found {rate:.0f}")


if __name__ == "__main__":
    main()
