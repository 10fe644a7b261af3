"""The environment: searches for the model until it answers (``--environment-path``).

Retrieval servers are named in SEARCH_ENDPOINTS, separated by commas. Searches go to them in turn; one that fails is
passed over.
"""

from __future__ import annotations

import itertools
import os
from functools import lru_cache
from typing import Any

import aiohttp

from examples.tool_model.calls import argument, result, tool
from miles_async.types import AssistantTurn, Observation, Prompt

SEARCH = tool("search", "Finds the document that fits the query best.", "query")
TIMEOUT = aiohttp.ClientTimeout(total=10)


class SearchEnvironment:
    """One question. The first turn without a search is the answer; the run's reward (``--rm-type``) looks at it."""

    def __init__(self, prompt: Prompt) -> None:
        self._retrieval = retrieval(os.environ.get("SEARCH_ENDPOINTS", ""))

    def tools(self) -> list[dict[str, Any]]:
        return [SEARCH]

    async def step(self, turn: AssistantTurn) -> Observation:
        calls = turn.message.get("tool_calls", [])
        return Observation(
            messages=tuple([result(call, await self._retrieval.search(argument(call, "query"))) for call in calls]),
            done=not calls,
            metrics={"searches": len(calls)},
        )

    async def close(self) -> None:
        pass


class Retrieval:
    """Several servers with the same corpus: in turn, and the next one where one fails."""

    def __init__(self, endpoints: list[str]) -> None:
        if not endpoints:
            raise ValueError("SEARCH_ENDPOINTS: expected URLs of retrieval servers, separated by commas")
        self._endpoints = endpoints
        self._turn = itertools.count()
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str) -> str:
        """The text of the best document. Raises ConnectionError when no server answers."""
        first, failures = next(self._turn), []
        for offset in range(len(self._endpoints)):
            endpoint = self._endpoints[(first + offset) % len(self._endpoints)]
            try:
                documents = await self._ask(endpoint, query)
            except (aiohttp.ClientError, TimeoutError) as error:
                failures.append(f"{endpoint}: {error!r}")
            else:
                return documents[0]["text"] if documents else "nothing found"
        raise ConnectionError(f"no retrieval server answers: {'; '.join(failures)}")

    async def _ask(self, endpoint: str, query: str) -> list[dict[str, str]]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=TIMEOUT)
        async with self._session.post(f"{endpoint}/search", json={"query": query, "k": 1}) as response:
            response.raise_for_status()
            return (await response.json())["documents"]


@lru_cache
def retrieval(endpoints: str) -> Retrieval:
    """One for all episodes, so that they share its connections."""
    return Retrieval([endpoint.strip() for endpoint in endpoints.split(",") if endpoint.strip()])
