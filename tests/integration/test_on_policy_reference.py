"""``--on-policy`` against the loop that it stands for, written plainly: generate, train, publish, strictly in turn.

With several engines and many requests at a time it is compared in all that no sampling decides: who is trained when, in
which order and from which weights. With one engine and one request at a time also in what was sampled, to the last bit:
then the order of requests decides who gets which random numbers, and nothing else does. (SGLang heeds a seed per
request only with --enable-deterministic-inference, which refuses the attention that runs on a CPU.)

# covers: C11, C2
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.server_groups import server_groups
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.kind import SGLANG
from miles_async.ledger.reader import AttemptRecord
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.train_data.batch import digests
from miles_async.wiring.driver_process import with_absolute_paths
from miles_async.wiring.engines import server_spec
from miles_async.wiring.replay import Replay
from tests.integration.plain_loop import Step, plain_loop
from tests.integration.rank_processes import run_ranks
from tests.integration.real_run import QUICKSTART, ROOT, real_run
from tests.integration.trained_prompts import attempts, source_order

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

RUN_SECONDS = 300.0
NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 4, 16, 8
ON_POLICY = ("--on-policy", "--eval-prompt-data", "none", "--eval-interval", "none", "--lr-warmup-iters", "0")


@dataclass(frozen=True)
class Trained:
    """One group, as the optimizer got it."""

    step: int
    attempt_id: int
    prompt_id: str
    admitted_under: int  # version
    sampled_by: tuple[int, int]  # oldest and newest version of the tokens that carry loss
    trained_from: int  # version
    num_samples: int


def reference_loop() -> Iterator[Trained]:
    """On-policy training without any of our code but the order of the prompts."""
    prompts = iter(source_order(NUM_STEPS * BATCH_SIZE))
    attempt_id = version = 0
    for step in range(1, NUM_STEPS + 1):
        for _ in range(BATCH_SIZE):
            yield Trained(step, attempt_id, next(prompts), version, (version, version), version, GROUP_SIZE)
            attempt_id += 1
        version += 1  # one optimizer step, published before the next prompt is taken


def as_trained(row: AttemptRecord) -> Trained:
    assert row.step is not None, row
    assert row.target_version is not None, row
    assert row.oldest_version is not None, row
    assert row.newest_version is not None, row
    return Trained(
        step=row.step,
        attempt_id=row.attempt_id,
        prompt_id=row.prompt_id,
        admitted_under=row.issued_version,
        sampled_by=(row.oldest_version, row.newest_version),
        trained_from=row.target_version,
        num_samples=len(row.response_lengths or ()),
    )


@pytest.mark.long  # the next one compares more, with one engine
def test_on_policy_is_the_plain_loop(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    flags = ("--num-rollout", str(NUM_STEPS), *ON_POLICY)
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    rows = attempts(run.run_dir)

    assert [as_trained(row) for row in rows] == list(reference_loop())  # nothing else was ever issued, nor twice
    # Strictly in turn by the clock, too: nothing of a step is admitted before all of the step before has been trained.
    for step in range(2, NUM_STEPS + 1):
        last_trained = max(row.ended_at or 0.0 for row in rows if row.step == step - 1)
        assert min(row.issued_at for row in rows if row.step == step) >= last_trained
    # What was reported is what was trained.
    for record in run.steps:
        rewards = [row.reward_mean or 0.0 for row in rows if row.step == record["step"]]
        assert record["reward/mean"] == pytest.approx(sum(rewards) / BATCH_SIZE, abs=1e-6)
        assert record["weight_version/trainer"] == record["weight_version/min"] == record["weight_version/max"]
        assert record["age/max"] == 0
        assert record["mixed_version_ratio"] == 0
    assert run.summary["age_histogram"] == {"0": NUM_STEPS * BATCH_SIZE * GROUP_SIZE}


def test_batches_are_those_of_the_plain_loop_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_imports: Path, imported_reverse: tuple[str, ...]
) -> None:
    flags = ("--num-rollout", "3", "--rollout-batch-size", "4", "--rollout-num-gpus", "1", *ON_POLICY)
    flags += ("--actor-num-gpus-per-node", "1", "--rollout-concurrency-per-engine", "1")
    monkeypatch.chdir(ROOT)
    with real_run(tmp_path / "run", *flags, "--record", command=imported_reverse) as run:
        arguments = with_absolute_paths(parse_arguments([f"@{QUICKSTART}/reverse.args", *flags]).arguments)
        steps = asyncio.run(_plain_steps(arguments, tmp_path, engine_imports))
        assert run.wait(RUN_SECONDS) == 0, run.output

    for (shard, metrics), trained, reported in zip(steps, Replay.of_run(run.run_dir), run.steps, strict=True):
        assert digests([shard]) == trained.digests
        # And what training made of it: loss, gradient norm, ...
        expected = {f"train/{name}": value for name, value in metrics.items() if "seconds" not in name}
        assert {name: reported[name] for name in expected} == expected
        assert reported["reward/mean"] > 0  # there was something to learn


async def _plain_steps(arguments: Arguments, directory: Path, imports: Path) -> list[Step]:
    """The plain loop with a server like the run's, but that nobody publishes to."""
    template = ChatTemplate(load_tokenizer(QUICKSTART / "assets" / "reverse" / "model"), apply_chat_template=True)
    count = arguments.rollout.num_rollout * arguments.rollout.rollout_batch_size
    prompts = [prompt for _, prompt in FilePromptSource(arguments.data, template.encode).take(count)]
    [group] = server_groups(arguments)
    spec = server_spec(arguments, group, directory / "logs", "cpu")
    spec = msgspec.structs.replace(spec, dummy_weights=False, fork_server=imports)
    server = ServerProcess(SGLANG, spec, engine_index=0, incarnation=0)
    try:
        rest = (await server.start(), arguments, prompts, directory)
        results = await asyncio.to_thread(run_ranks, 1, plain_loop, *rest, timeout=RUN_SECONDS)
        return cast(list[Step], results[0])
    finally:
        await server.stop()
