"""What a publication costs: rate and pause, against a plain gloo broadcast of the same bytes and a reload.

The real publisher, transports, staging, sender and receiving loop; synthetic float32 models; instead of engines,
processes that take weights as ours do: join a group, receive the buckets, copy their tensors into parameters, or load
the files. One core each at best, so with more receivers than cores everything is slower, the plain broadcast too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from miles_async.seams import InferenceServer, per_engine
from miles_async.weights.transports.distributed.driver import Broadcasts
from tests.benchmarks.publication_parts import HERE, SIZES
from tests.benchmarks.publication_processes import Fleet, Trainer, processes, publisher, total_cpu_seconds
from tests.benchmarks.report import Row

ENDS = ((1, 1), (2, 1), (4, 1), (1, 2))  # receivers and senders
ITEM_BYTES = 4  # float32
PUBLICATIONS = 3  # of each kind; the best is shown
REQUIRED = 0.8  # of the plain broadcast's rate


@dataclass(frozen=True)
class Plain:
    """Plain broadcasts of as many buckets, of memory that everybody has touched."""

    rate: float  # bytes per second, into one buffer
    copied_rate: float  # the same where receivers, as engines do, take a new buffer each time and copy it
    cpu_seconds: float  # of the latter, in all processes


async def measure(size: str, receivers: int, senders: int) -> Row:
    async with processes(size, [HERE] * receivers, sending=[HERE] * senders) as (trainer, fleet):
        before = await measure_plain(trainer, fleet)
        async with publisher(trainer, fleet, "distributed") as publish:
            distributed = [await publish(version) for version in range(PUBLICATIONS)]
        disk = []
        if senders == 1:  # as in a run
            async with publisher(trainer, fleet, "disk") as publish:
                disk = [(await publish(PUBLICATIONS + version)).publication for version in range(PUBLICATIONS)]
        after = await measure_plain(trainer, fleet)
        uncopied = await measure_uncopied(trainer, fleet)
    best = max(distributed, key=lambda published: published.rate)
    plain, copied = max(before.rate, after.rate), max(before.copied_rate, after.copied_rate)
    publication = best.publication
    return {
        "parameters": size,
        "receivers": receivers,
        "senders": senders,
        "MB_per_second": round(best.rate / 1e6),
        "plain_gloo_MB_per_second": round(plain / 1e6),
        "of_plain_gloo": round(best.rate / plain, 2),
        "of_gloo_and_copy": round(best.rate / copied, 2),
        "uncopied_of_plain_gloo": round(uncopied / plain, 2),
        "meets_goal": best.rate / plain >= REQUIRED,
        "cpu_seconds": round(min(published.cpu_seconds for published in distributed), 2),
        "gloo_and_copy_cpu_seconds": round(min(before.cpu_seconds, after.cpu_seconds), 2),
        "prepare_seconds": round(publication.prepare_seconds, 3),
        "pause_seconds": round(publication.pause_seconds, 3),
        "pause_of_total": round(
            publication.pause_seconds / (publication.pause_seconds + publication.prepare_seconds), 2
        ),
        "canary_seconds": round(publication.step_seconds["canary"], 3),
        **({"pause_by_disk_seconds": round(min(each.pause_seconds for each in disk), 3)} if disk else {}),
        **(await measure_delta(size) if receivers == senders == 1 else {}),
    }


async def measure_uncopied(trainer: Trainer, fleet: Fleet) -> float:
    """Rate to receivers that copy nothing, in bytes per second: copies compete with the senders for this machine's
    cores.
    """
    await fleet._each((await fleet.members()).serving, "copy_no_more")
    async with publisher(trainer, fleet, "distributed") as publish:
        return max([(await publish(version)).rate for version in range(PUBLICATIONS)])


async def measure_delta(size: str) -> Row:
    """To one receiver: several on this machine would share its cores for what each engine's node does by itself."""
    async with (
        processes(size, [HERE], delta=True) as (trainer, fleet),
        publisher(trainer, fleet, "disk", delta="xor") as publish,
    ):
        first, *deltas = [(await publish(version)).publication for version in range(1 + PUBLICATIONS)]
    best = min(deltas, key=lambda publication: publication.pause_seconds)
    assert first.sent_fraction == 1.0
    return {
        "delta_sent": round(best.sent_fraction, 3),
        "delta_prepare_seconds": round(best.prepare_seconds, 3),
        "delta_pause_seconds": round(best.pause_seconds, 3),
        "delta_pause_of_total": round(best.pause_seconds / (best.pause_seconds + best.prepare_seconds), 2),
    }


async def measure_plain(trainer: Trainer, fleet: Fleet) -> Plain:
    """Broadcast, from the first sender, as many bytes in as many buckets as all senders have."""
    await trainer.copy_weights(0)
    staged = await trainer.stage_weights(0)
    sizes = [sum(ITEM_BYTES * math.prod(meta.shape) for meta in bucket) for bucket in staged.buckets.values()]
    sender = trainer.sender(0)
    address, port = await sender.call(Broadcasts.open_group, "plain", 1 + len(fleet.processes))
    engines = (await fleet.members()).serving
    ranks = per_engine({engine: rank for rank, engine in enumerate(engines, start=1)})
    await asyncio.gather(
        sender.call(Broadcasts.join_group, "plain"),
        fleet.call(engines, InferenceServer.join_group, ranks, "plain", address, port, 1 + len(engines), "gloo"),
    )
    rates, cpu_seconds = [], []
    for receive in (("receive_plainly", "plain", sizes), ("receive_all", "plain", tuple(staged.buckets.values()))):
        seconds, cpu = [], []
        for _ in range(2):
            before = await total_cpu_seconds(trainer, fleet)
            started = time.perf_counter()
            await asyncio.gather(
                trainer.processes[0].call("send_plainly", "plain", sizes), fleet._each(engines, *receive)
            )
            seconds.append(time.perf_counter() - started)
            cpu.append(await total_cpu_seconds(trainer, fleet) - before)
        rates.append(sum(sizes) / min(seconds))
        cpu_seconds.append(min(cpu))
    await asyncio.gather(
        sender.call(Broadcasts.leave_group, "plain"), fleet.call(engines, InferenceServer.leave_group, "plain")
    )
    return Plain(rate=rates[0], copied_rate=rates[1], cpu_seconds=cpu_seconds[1])


def rows(sizes: Sequence[str] = tuple(SIZES), ends: Sequence[tuple[int, int]] = ENDS) -> Iterator[Row]:
    """One per size of the model and number of receivers and senders."""
    for size in sizes:
        for receivers, senders in ends:
            yield asyncio.run(measure(size, receivers, senders))
