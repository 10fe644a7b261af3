"""``ipc``: engines on the sending rank's own GPU copy each bucket from its memory, by CUDA IPC handles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.weights.transports.ipc.driver import IpcTransport
from miles_async.weights.transports.spec import RankSide, TransportSpec

if TYPE_CHECKING:
    from miles_async.weights.transports.ipc.rank import IpcSender


def _rank(side: RankSide) -> IpcSender:
    from miles_async.weights.transports.ipc.rank import IpcSender

    return IpcSender(side)


SPEC = TransportSpec(name="ipc", driver=IpcTransport, rank=_rank, devices=("cuda",))
