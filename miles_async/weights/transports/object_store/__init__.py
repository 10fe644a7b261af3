"""``object_store``: Ray's object store brings the staged files to each engine's host, and engines load them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.weights.transports.object_store.driver import make_driver
from miles_async.weights.transports.spec import RankSide, TransportSpec

if TYPE_CHECKING:
    from miles_async.weights.transports.object_store.rank import ObjectStoreSender


def _rank(side: RankSide) -> ObjectStoreSender:
    import ray

    from miles_async.weights.transports.object_store.rank import ObjectStoreSender

    return ObjectStoreSender(side.staging, put=ray.put)


SPEC = TransportSpec(name="object_store", driver=make_driver, rank=_rank, sender_per_stage=True, delta=True)
