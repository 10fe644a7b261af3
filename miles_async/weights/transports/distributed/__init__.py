"""``distributed``: each sending rank broadcasts its staged buckets to the engines, by NCCL or gloo."""

from __future__ import annotations

from miles_async.weights.transports.distributed.driver import Broadcasts, DistributedTransport
from miles_async.weights.transports.spec import RankSide, TransportSpec


def _rank(side: RankSide) -> Broadcasts:
    from miles_async.weights.transports.distributed.rank import DistributedSender

    return DistributedSender(side)


SPEC = TransportSpec(
    name="distributed",
    driver=DistributedTransport,
    rank=_rank,
    sender_per_stage=True,
    several_nodes=True,
    external_engines=True,
)
