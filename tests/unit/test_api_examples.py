"""Everything that users implement has an example in its docstring, and the example runs."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_async import api
from miles_async import types as nouns
from tests.property.builders import make_attempt, make_prompt, make_sample

PROTOCOLS = {
    name: kind for name, kind in vars(api).items() if inspect.isclass(kind) and getattr(kind, "_is_protocol", False)
}
GIVEN = {"EngineClient"}  # to users, who don't implement it
FILES = (api.algorithm, api.rollout, api.sampler, api.tracker, api.trainer)
EXAMPLES = [test for file in FILES for test in doctest.DocTestFinder().find(file) if test.examples]


class Client:
    """Answers every request with the same four tokens."""

    async def generate(self, request: nouns.GenerateRequest) -> nouns.Generation:
        return nouns.Generation(
            output_ids=np.array([7, 8, 9, 2], np.int32),
            logprobs=np.zeros(4, np.float32),
            weight_versions=np.zeros(4, np.int32),
            finish_reason="stop",
        )


class Completions(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "21"}}]}).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def base_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OPENAI_API_KEY", "the run sets it")
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_all_that_users_implement_has_an_example() -> None:
    assert {test.name.rpartition(".")[2] for test in EXAMPLES} >= set(PROTOCOLS) - GIVEN


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name.rpartition(".")[2])
def test_the_example_runs(example: doctest.DocTest, base_url: str, tmp_path: Path) -> None:
    samples = tuple(make_sample([0, 0], reward=0.5, text=text) for text in ("20", "20"))
    rewards, offsets, shown = np.array([0.25, 0.75], np.float32), np.array([0, 3, 5]), np.array([nouns.NOT_SHOWN, 5])
    batch = type("Batch", (), {"rewards": rewards, "offsets": offsets, "shown": shown})
    micro_batches = type("Shard", (), {"optimizer_steps": ((batch,),)})
    example.globs = {
        **vars(nouns),
        "asyncio": asyncio,
        "np": np,
        "torch": torch,
        "prompt": make_prompt(),
        "sample": samples[0],
        "group": nouns.Group(attempt=make_attempt(), samples=samples, oldest_version=0, newest_version=0),
        "attempt": make_attempt(),
        "turn": nouns.AssistantTurn(index=0, message={}, text="30", finish_reason="stop"),
        "client": Client(),
        "base_url": base_url,
        "shard": micro_batches,
        "directory": tmp_path,
    }
    found: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=found.append)
    assert not found, "".join(found)
