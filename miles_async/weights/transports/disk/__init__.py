"""``disk``: engines load the staged files, from a file system that the sending rank and all engines share.

The rank's half is ``Staging`` itself, which writes them.
"""

from __future__ import annotations

from miles_async.seams import WeightSender
from miles_async.weights.transports.disk.driver import make_driver
from miles_async.weights.transports.spec import RankSide, TransportSpec


def _rank(side: RankSide) -> WeightSender:
    from miles_async.weights.staging import Staging

    return Staging(side.staging)


SPEC = TransportSpec(name="disk", driver=make_driver, rank=_rank, shared_files=True, delta=True, several_nodes=True)
