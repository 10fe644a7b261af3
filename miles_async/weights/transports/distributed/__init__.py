"""``distributed``: each sending rank broadcasts its staged buckets to the engines, by NCCL or gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.weights.transports.distributed.driver import DistributedTransport
from miles_async.weights.transports.spec import RankSide, TransportSpec

if TYPE_CHECKING:
    from miles_async.weights.transports.distributed.rank import DistributedSender


def _rank(side: RankSide) -> DistributedSender:
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
