"""Microseconds per group in the staleness buffer, from a thousand to a million waiting groups. Run by hand.

    python -m tests.benchmarks.buffer_cost [--samples-per-group 8]

Prints one JSON object per size: cost of put, of a cut that takes a batch, of a sweep, and of all of them
per sample. Flat columns mean that the cost does not depend on how many groups wait.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from miles_async.staleness.buffer import StalenessBuffer
from miles_async.types import Attempt, Group, Prompt

BATCH_SIZE = 256
BOUND = 2
PROMPT = Prompt(prompt_id="p", token_ids=(1,), text="")


def make_groups(count: int) -> list[Group]:
    """In random order of arrival; five in six are of versions 3 to 7, fresh for target 5; one in six of 0 to 2."""
    chance = random.Random(0)
    groups = [
        Group(
            attempt=Attempt(attempt_id=attempt_id, prompt=PROMPT, epoch=0),
            samples=(None,),  # type: ignore[arg-type]  # the buffer never looks into them
            oldest_version=chance.choice([0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5]),
            newest_version=5,
        )
        for attempt_id in range(count)
    ]
    chance.shuffle(groups)
    return groups


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(count: int, samples_per_group: int) -> dict[str, float]:
    groups = make_groups(count)
    buffer = StalenessBuffer(BATCH_SIZE, BOUND)
    put = seconds(lambda: [buffer.put(group) for group in groups])
    swept: list[int] = []
    sweep = seconds(lambda: swept.append(len(buffer._sweep(5))))
    idle = seconds(lambda: [buffer._sweep(5) for _ in range(1000)]) / 1000
    taken = 0

    def take() -> None:
        nonlocal taken
        while found := buffer.cut(5).groups:
            taken += len(found)

    cut = seconds(take)
    total = (put + sweep + cut) / count
    return {
        "groups_waiting": count,
        "put_us_per_group": round(1e6 * put / count, 3),
        "sweep_us_per_stale_group": round(1e6 * sweep / swept[0], 3),
        "sweep_of_nothing_us": round(1e6 * idle, 3),
        "cut_us_per_group": round(1e6 * cut / taken, 3),
        "total_us_per_group": round(1e6 * total, 3),
        "total_us_per_sample": round(1e6 * total / samples_per_group, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples-per-group", type=int, default=8)
    samples_per_group = parser.parse_args().samples_per_group
    for count in (1_000, 10_000, 100_000, 1_000_000):
        print(json.dumps(measure(count, samples_per_group)), flush=True)


if __name__ == "__main__":
    main()
