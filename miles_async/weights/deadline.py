"""Deadlines of the publisher's waits that name what it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_async.errors import PublicationError


@asynccontextmanager
async def publication_deadline(seconds: float, awaited: str) -> AsyncIterator[None]:
    """Allow ``seconds``, of ``--publication-timeout``, for the block. Raises PublicationError with ``awaited``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise PublicationError(f"the publisher waited {seconds:g} s for {awaited} (--publication-timeout)") from error
