"""A real engine with random weights that constrains answers, behind the client that runs use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from transformers import PreTrainedTokenizerBase

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.kind import SGLANG
from tests.fakes.clients import client_of, registry_of, serving
from tests.integration.served_models import served_spec
from tests.integration.tiny_models import save_tiny


@asynccontextmanager
async def grammar_engine(
    model: Path, tokenizer: PreTrainedTokenizerBase, fork_server: Path, *, request_timeout: float
) -> AsyncIterator[tuple[RouterClient, psutil.Process]]:
    """Write a tiny Qwen3 with the vocabulary of ``tokenizer`` to ``model``, and serve it: its client and scheduler."""
    save_tiny("qwen3-tied", model, vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(model)
    spec = served_spec(model, model.parent, fork_server, grammars=True)
    server, http = ServerProcess(SGLANG, spec, 0, 0), Http()
    url = await server.start()
    body = {"new_version": "1", "abort_all_requests": False}
    async with http.session.post(f"{url}/update_weight_version", json=body) as response:
        assert response.status == 200
    [scheduler] = [child for child in psutil.Process(await server.pid()).children() if "scheduler" in child.name()]
    registry = registry_of(serving(url), version=1)
    try:
        yield client_of(http, registry, lambda: url, request_timeout=request_timeout), scheduler
    finally:
        await http.close()
        await server.stop()
