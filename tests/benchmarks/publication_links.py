"""What publications cost over links: the same bytes to engines on several machines, from one or two senders.

Machines are network namespaces whose links are limited (``tests/cluster``, which needs root), and slow enough for the
host's cores not to count. Rates are of deliveries, as in ``publication.py``.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.publication import measure_plain
from tests.benchmarks.publication_parts import Place
from tests.benchmarks.publication_processes import processes, publisher
from tests.benchmarks.report import Row
from tests.cluster.machines import Machine, Machines, machines, why_impossible

SIZE = "50M"
BUCKET_BYTES = 4 * 2**20
MEGABITS = 400  # per second, of every link that is limited
# Machines of the senders and of the receivers, by position. The last machine's link has no limit.
CASES = (((0,), (3,)), ((0, 1), (3,)), ((0,), (1, 1)), ((0,), (1, 2)), ((0,), (1, 1, 2, 2)))


async def measure(cluster: Machines, senders: Sequence[int], receivers: Sequence[int]) -> Row:
    def places(positions: Sequence[int]) -> list[Place]:
        return [Place(cluster[each].address, cluster[each].pid) for each in positions]

    async with processes(SIZE, places(receivers), sending=places(senders), bucket_bytes=BUCKET_BYTES) as parts:
        before = cluster.bytes_from(cluster[0])
        async with publisher(*parts, "distributed", verify="off") as publish:
            published = await publish(0)
        sent = cluster.bytes_from(cluster[0]) - before
        plain = await measure_plain(*parts) if len(senders) == 1 else None
    return {
        "senders": len(senders),
        "receivers": len(receivers),
        "machines_of_receivers": len(set(receivers)),
        "MB_per_second": round(published.rate / 1e6, 1),
        "sent_by_the_first_sender": round(sent / published.publication.total_bytes, 2),
        **({"of_plain_gloo": round(published.rate / plain.rate, 2)} if plain else {}),
    }


def limit(cluster: Machines, limited: Sequence[Machine]) -> None:
    for machine in limited:
        cluster.limit(machine, MEGABITS)


def rows() -> Iterator[Row]:
    """One per number of senders, receivers and machines."""
    if reason := why_impossible():
        yield {"not_measured": reason}
        return
    with tempfile.TemporaryDirectory() as directory, machines(Path(directory), 4) as cluster:
        limit(cluster, cluster.all[:-1])
        first: float | None = None
        for senders, receivers in CASES:
            row = asyncio.run(measure(cluster, senders, receivers))
            first = first or row["MB_per_second"]
            yield {**row, "of_one_sender_to_one": round(row["MB_per_second"] / first, 2)}
