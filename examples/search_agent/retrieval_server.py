"""A local retrieval server: ``POST /search {"query": "kib", "k": 1}`` → ``{"documents": [{"title", "text"}]}``.

    python -m examples.search_agent.retrieval_server

prints its URL when it listens. Documents are scored by the query's words that they hold, rare words more, words of the
title most: enough for a corpus that fits on a page. A real one stands behind the same request.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiohttp import web

CORPUS = Path(__file__).parent / "corpus.jsonl"
TITLE_WEIGHT = 3.0

Document = Mapping[str, str]


class Index:
    """The corpus, by words."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._words = [Counter(words(document["text"])) for document in documents]
        self._titles = [set(words(document["title"])) for document in documents]
        held_by = Counter(word for counts in self._words for word in counts)
        self._weight = {word: math.log(1 + len(documents) / count) for word, count in held_by.items()}

    def search(self, query: str, k: int) -> list[Document]:
        """The best ``k`` documents that hold any of the words."""
        asked = [word for word in words(query) if word in self._weight]
        scores = [
            sum(self._weight[word] * (bool(held[word]) + TITLE_WEIGHT * (word in title)) for word in asked)
            for held, title in zip(self._words, self._titles, strict=True)
        ]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
        return [self._documents[i] for i in best if scores[i] > 0]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def application(corpus: Path = CORPUS) -> web.Application:
    """The server, to be run by whoever wants to."""
    index = Index([json.loads(line) for line in corpus.read_text().splitlines()])

    async def search(request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response({"documents": index.search(asked["query"], asked.get("k", 1))})

    app = web.Application()
    app.add_routes([web.post("/search", search)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches a corpus.", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help=".jsonl of documents with title and text")
    options = parser.parse_args()
    listener = socket.create_server((options.host, options.port))
    print(f"http://{options.host}:{listener.getsockname()[1]}", flush=True)  # from here on connections wait for us
    web.run_app(application(options.corpus), sock=listener, print=None, shutdown_timeout=1.0)


if __name__ == "__main__":
    main()
