"""Digests of a batch's arrays and images, to compare batches to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from miles_async.types import TrainBatch, TrainShard

DIGEST_BYTES = 16


def digests(shards: Sequence[TrainShard]) -> dict[str, str]:
    """Field of TrainBatch → hash of that array over all micro-batches of all ranks, in order; and ``layout``: how
    they are dealt to ranks and optimizer steps. Arrays that batches don't have are left out.
    """
    batches = [batch for shard in shards for step in shard.optimizer_steps for batch in step]
    layout = [
        (s.dp_rank, s.dp_size, s.target_version, [len(step) for step in s.optimizer_steps], s.loss_tokens)
        for s in shards
    ]
    result = {"layout": hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=DIGEST_BYTES).hexdigest()}
    for name in TrainBatch.__struct_fields__:
        arrays = [getattr(batch, name) for batch in batches]
        if any(array is None for array in arrays):
            continue
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for array in arrays:
            if name == "pictures":
                hasher.update(msgspec.msgpack.encode([[picture.digest for picture in own] for own in array]))
            else:
                hasher.update(array.data)  # offsets are hashed too, so where one ends is
        result[name] = hasher.hexdigest()
    return result
