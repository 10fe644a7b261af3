"""HTTP of one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_async.engines.http import Http


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    http = Http()
    yield http
    await http.close()
