"""The sending ranks as repairs call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.seams import WeightSenders


class RepairSenders:
    """Implements WeightSenders: in the thread for repairs."""

    def __init__(self, senders: WeightSenders) -> None:
        self._senders = senders

    async def call_sender(
        self, method: str, arguments: Sequence[Any] = (), *, sender: int = 0, repair: bool = True
    ) -> Any:
        return await self._senders.call_sender(method, arguments, sender=sender, repair=repair)
