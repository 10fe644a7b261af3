"""Memory that engines need per GPU, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import read_config
from miles_async.arguments.server_groups import ServerGroup, server_groups
from miles_async.engines.sglang.cpu_memory import cache_bytes_per_token

GIB = 1 << 30
STATIC_FRACTION = 0.85  # of a GPU, for weights and cache, where no flag says it; SGLang chooses 0.8 to 0.9 by the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """Bytes on one GPU of an engine."""

    group: ServerGroup
    weights: int
    cache_per_token: int  # 0: config.json does not tell
    cache_tokens: int | None  # room for so many tokens; None if the GPU's memory is not known


def engine_bytes(arguments: Arguments, parameters: int) -> Iterator[EngineBytes]:
    """Compute the bytes for each group of engines that gets the run's weights. ``parameters``: of the whole model."""
    assert arguments.model.hf_checkpoint is not None
    config = read_config(arguments.model.hf_checkpoint)
    item, memory = (2 if arguments.model.bf16 else 4), arguments.cluster.gpu_memory_gb
    whole = cache_bytes_per_token(config, "bfloat16" if arguments.model.bf16 else "float32") or 0
    for group in server_groups(arguments):
        if group.external or group.role == "frozen":
            continue
        size = group.gpus_per_engine
        weights = parameters * item // size
        # Ranks share the heads, none has less than one; latent attention keeps one vector for all, on every rank.
        share = 1 if config.get("kv_lora_rank") else min(size, int(config.get("num_key_value_heads") or size))
        per_token, room = whole // share, None
        if memory is not None and per_token:
            room = int(max(0, memory * GIB * _static_fraction(arguments, group) - weights) // per_token)
        yield EngineBytes(group=group, weights=weights, cache_per_token=per_token, cache_tokens=room)


def _static_fraction(arguments: Arguments, group: ServerGroup) -> float:
    words = [part for word in (*arguments.engines.sglang_extra, *group.sglang_extra) for part in word.split("=", 1)]
    given = [value for name, value in pairwise(words) if name == "--mem-fraction-static"]
    return float(given[-1]) if given else STATIC_FRACTION
