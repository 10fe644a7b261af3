"""What tokens cost on their way through the rollout process, in its own CPU time: from answers to samples, and from
samples to what the trainer's ranks get.

Each figure stands beside another of the same run: packed answers beside JSON, batches beside plain copies of as many
bytes.
"""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from msgspec.structs import replace

from miles_async.engines.sglang.answers import MEDIA_TYPE, pack, read_answer
from miles_async.rollout.generate import build_sample, check_sample
from miles_async.runtime.detokenize import decode_tokens
from miles_async.staleness.versions import group_of, token_versions
from miles_async.train_data.batch import tabulate
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.train_data.metrics import age_histogram, batch_metrics
from miles_async.types import Attempt, Group, Prompt, Sample, TrainShard
from tests.benchmarks.report import Row
from tests.benchmarks.vocabulary import SIZE, chat, tokenizer
from tests.json_dict import JsonDict

LENGTHS = (512, 8192)  # tokens of an answer
TOKENS_PER_BATCH = 1 << 23
GROUP_SIZE, RANKS, VERSION = 8, 8, 3
MICRO_BATCH = 16_384  # tokens
PAYLOAD = 4 + 1 + 4 + 4  # bytes per token that the trainer gets
PROMPT = Prompt(prompt_id="0", token_ids=tuple(range(64)), text="")
VERSIONS = partial(token_versions, dispatch_version=VERSION, tokens_in_flight=1)


MAKER = BatchMaker(
    estimator=lambda groups: np.zeros(sum(len(group.samples) for group in groups), np.float32),
    dp_size=RANKS,
    max_tokens=MICRO_BATCH,
    optimizer_steps=1,
    bound=None,
)


def cpu_seconds(call: Callable[[], object], *, least: float = 0.5) -> float:
    """CPU seconds of one call: the smallest of several, repeated for ``least`` seconds in all."""
    call()
    best, spent = float("inf"), 0.0
    while spent < least:
        started = time.thread_time()
        call()
        seconds = time.thread_time() - started
        best, spent = min(best, seconds), spent + seconds
    return best


def reply(length: int) -> JsonDict:
    """An answer as SGLang has it before it is written."""
    chance = np.random.default_rng(0)
    ids = chance.integers(0, SIZE, length).tolist()
    logprobs = (-chance.exponential(size=length)).astype(np.float32).tolist()
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(PROMPT.token_ids),
        "weight_version": str(VERSION),
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": length}],
        "output_token_logprobs": [(logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)],
    }
    return {"output_ids": ids, "meta_info": meta}


def packed_reply(plain: JsonDict) -> bytes:
    """As an engine that we start packs it, with the text."""
    packed = pack(plain, decode_tokens(tokenizer(), plain["output_ids"]))
    assert packed is not None
    return packed


def to_sample(body: bytes, content_type: str) -> Sample:
    """All that is done with an answer, but for the network."""
    turn = read_answer(body, content_type, "", VERSIONS)
    text = chat().decode(turn.output_ids.tolist()) if turn.text is None else chat().trim(turn.text)
    sample = build_sample(PROMPT, turn, text)
    check_sample(sample)
    return sample


def answers() -> Iterator[Row]:
    """From the bytes of an answer to a sample."""
    for length in LENGTHS:
        plain = reply(length)
        packed = packed_reply(plain)
        whole = {}
        for form, body, content_type in (
            ("JSON", json.dumps(plain, separators=(",", ":")).encode(), "application/json"),
            ("packed", packed, MEDIA_TYPE),
        ):
            read = cpu_seconds(partial(read_answer, body, content_type, "", VERSIONS))
            whole[form] = cpu_seconds(partial(to_sample, body, content_type))
            yield {
                "tokens": length,
                "answer": form,
                "bytes_per_token": round(len(body) / length, 1),
                "read_us": round(1e6 * read, 1),
                "read_Mtok_per_s": round(length / read / 1e6, 1),
                "sample_us": round(1e6 * whole[form], 1),
                "sample_Mtok_per_s": round(length / whole[form] / 1e6, 1),
                "of_json": round(whole[form] / whole["JSON"], 3),
            }


def batch_of(length: int) -> list[Group]:
    """Groups whose answers have half of ``length`` to all of it."""
    chance = np.random.default_rng(0)
    groups, tokens = [], 0
    while tokens < TOKENS_PER_BATCH:
        samples = []
        for _ in range(GROUP_SIZE):
            samples.append(to_sample(packed_reply(reply(int(chance.integers(length // 2, length)))), MEDIA_TYPE))
        attempt = Attempt(attempt_id=len(groups), prompt=PROMPT, epoch=0)
        groups.append(group_of(attempt, [replace(sample, reward=0.5) for sample in samples]))
        tokens += sum(len(sample.tokens) for sample in samples)
    return groups


def finished(groups: list[Group]) -> list[Group]:
    """As the dispatcher makes groups of their samples."""
    return [group_of(group.attempt, group.samples) for group in groups]


def to_shards(groups: list[Group]) -> tuple[TrainShard, ...]:
    """As ``BatchMaker.make`` does, with advantages of zero."""
    table = tabulate(groups, MAKER.estimator(groups))
    shards = MAKER.split(table, VERSION)
    batch_metrics(groups, table, VERSION)
    age_histogram(table, VERSION)
    return shards


def hand_over(shards: tuple[TrainShard, ...]) -> tuple[int, list[pickle.PickleBuffer]]:
    """As Ray serializes objects: bytes in band, and the buffers that it moves to its object store."""
    buffers: list[pickle.PickleBuffer] = []
    in_band = sum(len(pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)) for shard in shards)
    return in_band, buffers


def batches() -> Iterator[Row]:
    """From the samples of a cut to what Ray puts into its object store."""
    for length in LENGTHS:
        groups = batch_of(length)
        tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
        samples = sum(len(group.samples) for group in groups)
        tracemalloc.start()
        shards = to_shards(groups)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        in_band, buffers = hand_over(shards)
        serialize = cpu_seconds(partial(hand_over, shards))
        convert = cpu_seconds(partial(to_shards, groups))
        finish = cpu_seconds(partial(finished, groups))
        copy = cpu_seconds(np.ones(PAYLOAD * tokens, np.uint8).copy)
        yield {
            "tokens": tokens,
            "longest": length,
            "convert_Mtok_per_s": round(tokens / convert / 1e6),
            "and_serialize_Mtok_per_s": round(tokens / (convert + serialize) / 1e6),
            "us_per_sample": round(1e6 * (convert + serialize) / samples, 1),
            "us_per_sample_when_groups_finish": round(1e6 * finish / samples, 1),
            "of_a_copy": round((convert + serialize) / copy, 2),
            "peak_bytes_per_token": round(peak / tokens, 1),
            "peak_of_payload": round(peak / tokens / PAYLOAD, 2),
            "in_band_bytes_per_token": round(in_band / tokens, 2),
            "buffers": len(buffers),
        }
