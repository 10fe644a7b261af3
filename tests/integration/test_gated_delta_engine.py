"""A real SGLang server on a CPU generates with gated delta nets (Qwen3-Next, Qwen3.5), Mamba-2 (Nemotron-H) and caches
of two kinds of layers (Gemma 4) what transformers would: its log-probs are theirs, whether a prompt is read at once, in
parts, from the cache of prefixes, or beside other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_async.engines.http import Http
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.kind import SGLANG
from tests.integration.served_models import reference_logprobs, save_served, served_spec
from tests.integration.tiny_models import VOCAB

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

PARTS = 64  # tokens of a prompt that are read at once


@asynccontextmanager
async def served(model: Path, logs: Path, imports: Path, **settings: Any) -> AsyncIterator[str]:
    """URL of a server of ``model``."""
    spec = served_spec(model, logs, imports, extra=(f"--chunked-prefill-size={PARTS}",), **settings)
    server = ServerProcess(SGLANG, spec, 0, 0)
    try:
        yield await server.start()
    finally:
        await server.stop()


async def generate(http: Http, url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """SGLang's answer, with log-probs of what it generates."""
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with http.session.post(f"{url}/generate", json=body, timeout=aiohttp.ClientTimeout(60)) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def check(model: Path, prompt: list[int], answer: dict[str, Any]) -> list[int]:
    """Compare the log-probs with transformers'; returns prompt and response."""
    found = answer["meta_info"]["output_token_logprobs"]
    tokens = prompt + [token for _, token, _ in found]
    expected = reference_logprobs(model, tokens)[len(prompt) - 1 :]
    np.testing.assert_allclose([logprob for logprob, *_ in found], expected, rtol=0, atol=1e-5)
    return tokens


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next",
        "nemotron-h",
        "gemma4",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen3.5", "qwen3.5-moe", "nemotron-h-moe", "gemma4-moe")
        ),
    ],
)
async def test_logprobs_equal_transformers(family: str, tmp_path: Path, engine_imports: Path) -> None:
    model = save_served(family, tmp_path / "model", seed=0)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, VOCAB, length).tolist() for length in (1, 3, 4, 30, PARTS, 2 * PARTS + 5)]
    http = Http()
    try:
        async with served(model, tmp_path / "logs", engine_imports) as url:
            first = check(model, prompts[3], await generate(http, url, prompts[3], 20))
            answers = await asyncio.gather(*(generate(http, url, prompt, 40) for prompt in prompts))
            whole = [check(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
            later = [[*first, 5, 6, 7], [*whole[5], 9], [*whole[5][: PARTS + 10], 11]]  # turns that follow
            answers = await asyncio.gather(*(generate(http, url, prompt, 10) for prompt in later))
            for prompt, answer in zip(later, answers, strict=True):
                check(model, prompt, answer)
            assert max(answer["meta_info"]["cached_tokens"] for answer in answers) > PARTS
    finally:
        await http.close()
