"""A real engine is killed while an agent reads a stream, by each protocol: the agent is told, and nothing that was lost
is trained.

# covers: M13, C2, C6
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from miles_async.ledger.reader import open_ledger
from miles_async.samples.reader import read_summaries, samples_files
from miles_async.staleness.ledger import Outcome
from miles_async.types import JsonObject
from tests.fakes.chat_formats import chat_format
from tests.integration.real_run import RealRun, real_run
from tests.integration.streaming_agents import PROTOCOLS, solve
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

SECONDS = 400.0
FLAGS = (
    *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-rollout", "2"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "3", "--save-samples", "8"),
    *("--eval-prompt-data", "none", "--eval-interval", "none", "--metadata-key", "metadata"),
    *("--rollout-max-response-len", "600", "--max-tokens-per-gpu", "1000", "--rm-type", "none"),
    *("--agent-path", f"{solve.__module__}:{solve.__name__}", "--agent-timeout", "120", "--lr", "1e-6"),
    *("--engine-max-restarts", "20"),
)


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """Those of a run of agents whose model has random weights, so that its answers are long and each is another."""
    tokenizer = chat_format("qwen3").tokenizer
    model = save_tiny("qwen3-tied", tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.save_pretrained(model)
    metadata = {"folder": str(tmp_path)}
    rows = [{"prompt": f"say {row}", "label": "", "metadata": metadata} for row in range(32)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (*FLAGS, "--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "prompts.jsonl"))


def kill_engines(run: RealRun, folder: Path) -> None:
    """Kill the engine at each protocol's request."""
    deadline = time.monotonic() + SECONDS
    while not all((folder / f"told-{protocol}").exists() for protocol in PROTOCOLS):
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        for protocol in PROTOCOLS:
            if (folder / f"kill-{protocol}").exists():
                engines = run.engine_processes()
                assert len(engines) == 1
                engines[0].kill()
                engines[0].wait(10)
                (folder / f"kill-{protocol}").unlink()
                (folder / f"killed-{protocol}").touch()
        time.sleep(0.02)


def test_an_agent_is_told_and_nothing_that_was_lost_is_trained(
    tmp_path: Path, flags: tuple[str, ...], imported_reverse: tuple[str, ...]
) -> None:
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        kill_engines(run, tmp_path)
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    streams: list[JsonObject] = [json.loads(line) for line in (tmp_path / "streams.jsonl").read_text().splitlines()]
    lost = {stream["protocol"]: stream for stream in streams if stream["asked"] and stream["outcome"] != "complete"}
    assert {*lost} == {*PROTOCOLS}
    for protocol, stream in lost.items():
        client = "anthropic" if protocol == "messages" else "openai"
        assert stream["outcome"].startswith(f"{client}: "), stream
    whole = Counter(plain(stream["shown"]) for stream in streams if stream["outcome"] == "complete")
    rows = [row for file in samples_files(run.run_dir) for row in read_summaries(file.path)]
    trained = [plain("".join(said(json.loads(row.messages or "[]")[-1]))) for row in rows]
    assert len(trained) == 2 * 2 * 3
    assert Counter(trained) <= whole, "each was shown whole, once"  # a restarted engine may begin with the same tokens
    assert {(row.branches, row.length - row.loss_tokens) for row in rows} == {(1, 0)}
    assert run.summary["balanced"]
    with open_ledger(run.run_dir / "ledger.sqlite") as ledger:
        attempts = [record for record in ledger.page(limit=1000) if record.outcome is Outcome.TRAINED]
    assert len(attempts) == run.summary["groups"]["trained"] == 4
    assert max(Counter((each.prompt_id, each.epoch) for each in attempts).values()) == 1
    assert run.summary["logprob_diff"]["max"] < 1e-3


def said(message: JsonObject) -> tuple[str, str]:
    return message.get("reasoning_content") or "", message.get("content") or ""


def plain(text: str) -> str:
    """Without white space, which streams hold back at their ends."""
    return "".join(text.split())
