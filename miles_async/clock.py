"""The clock of everything that runs on an event loop: monotonic seconds, virtual ones in a simulation."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds on the running loop's clock; only differences mean something."""
    return asyncio.get_running_loop().time()
