"""Batches of examples: whole, split over ranks, and resumed where a checkpoint was taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.arguments import Arguments
from miles_async.arguments.parser import parse_arguments
from miles_async.errors import CheckpointError
from miles_async.runs.prompt_checks import check_tokenizer
from miles_async.seams import Resumption
from miles_async.types import TrainShard
from miles_async.wiring import prepared_batches
from miles_async.wiring.prepared_batches import SupervisedBatches

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_batches.ray, "put", lambda value: value)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    monkeypatch.chdir(ROOT)
    prepare_quickstart(["--task", "reverse"])
    words = ["@examples/quickstart/sft.args", "--rollout-batch-size", "8", "--global-batch-size", "4"]
    return parse_arguments(words).arguments


def sequences(shards: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask) of all examples of both ranks, without fillers."""
    found = []
    for shard in shards:
        assert isinstance(shard, TrainShard)
        for batch in (batch for step in shard.optimizer_steps for batch in step):
            for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                if batch.loss_mask[start:end].any():
                    found.append((batch.tokens[start:end].tolist(), batch.loss_mask[start:end].tolist()))
    return found


async def test_a_batch_is_the_next_examples_dealt_to_ranks(arguments: Arguments) -> None:
    batches = SupervisedBatches(arguments)
    batch = await batches(0)
    assert len(batch.shards) == 2
    assert len(batch.prompt_ids) == 8
    assert batch.ages == {0: 8}
    assert batch.metrics["sft/epoch"] == 0
    found = sequences(batch.shards)
    assert len(found) == 8
    shards: Any = batch.shards
    for tokens, mask in found:  # <bos> <|user|> r e v _ 5 digits <|assistant|>, and what is learned: 5 digits <eos>
        assert mask == [0] * (len(tokens) - 6) + [1] * 6
        assert tokens[-6:-1] == tokens[-12:-7][::-1]
    assert shards[0].loss_tokens == (4 * 6, 4 * 6)
    assert not np.concatenate([b.rollout_logprobs for s in shards for step in s.optimizer_steps for b in step]).any()


def test_the_dry_run_counts_rows_that_will_be_skipped(arguments: Arguments, tmp_path: Path) -> None:
    assert check_tokenizer(arguments) == []
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "rev 12", "label": "21"}\n{"prompt": "rev 13", "label": ["31", "13"]}\n')
    data = replace(arguments.data, prompt_data=(str(path),), bad_rows="skip")
    [note] = check_tokenizer(replace(arguments, data=data))
    assert note.startswith("1 of 2 rows are skipped (--bad-rows skip), the first: ")
    assert "train.jsonl:2: " in note


async def test_a_checkpoint_goes_on_with_the_next_examples(arguments: Arguments, tmp_path: Path) -> None:
    # covers: C9
    batches = SupervisedBatches(arguments)
    await batches(0)
    await batches.snapshot()
    await batches.save(tmp_path)
    expected = await batches(1)
    resumed = SupervisedBatches(arguments)
    await resumed.load(tmp_path, Resumption(step=1, version=0))
    again = await resumed(1)
    assert again.prompt_ids == expected.prompt_ids
    assert sequences(again.shards) == sequences(expected.shards)
    with pytest.raises(CheckpointError, match="expected a checkpoint of --loss-type sft_loss"):
        await resumed.load(tmp_path / "none", Resumption(step=1, version=0))
