"""Memory that engines need per GPU, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import read_config
from miles_async.arguments.server_groups import ServerGroup, attention_groups, given_sglang_flags, server_groups
from miles_async.engines.cache_bytes import cache_bytes_per_token, state_bytes
from miles_async.engines.sglang.server import SHARED_GPU_FRACTION
from miles_async.train_data.work import model_work
from miles_async.weights.fp8 import published_bytes

GIB = 1 << 30
STATIC_FRACTION = 0.85  # of a GPU, for weights and cache, where no flag says it; SGLang chooses 0.8 to 0.9 by the GPU
STATE_RATIO = 0.9  # SGLang's default of --mamba-full-memory-ratio: memory of linear attention's states ÷ cache memory


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """Bytes on one GPU of an engine."""

    group: ServerGroup
    weights: int
    cache_per_token: int  # 0: config.json, or --sglang-kv-cache-dtype, does not say
    cache_tokens: int | None  # room for so many tokens in each cache; None if the GPU's memory is unknown
    caches: int  # one; with data-parallel attention several, each of some of the engine's GPUs and requests


def engine_bytes(arguments: Arguments, parameters: int) -> Iterator[EngineBytes]:
    """Compute the bytes for each group of engines that gets the run's weights. ``parameters``: of the whole model.

    With data-parallel attention, the ranks of one cache share the weights of attention and embedding, and the heads of
    keys and values; all ranks share the rest (SGLang 0.5, ``derive_attn_tp_size``).
    """
    config = read_config(arguments.model.directory)
    item, memory = (2 if arguments.model.bf16 else 4), arguments.cluster.gpu_memory_gb
    work, quantization = model_work(config), arguments.weights.rollout_quantization
    for group in server_groups(arguments):
        if group.external or group.role == "frozen":
            continue
        flags = given_sglang_flags(arguments, group)
        caches = attention_groups(flags)
        size = group.gpus_per_engine
        ranks = max(1, size // caches)  # of one cache
        attention, embedding = (0, 0) if work is None else (work.attention_weights, work.embedding_weights)
        elements = parameters + (caches - 1) * attention
        weights = published_bytes(config, elements, item=item, quantization=quantization)
        weights = (weights + (caches - 1) * embedding * item) // size
        # Ranks share the heads, none has less than one; latent attention keeps one vector for all, on every rank.
        share = 1 if config.get("kv_lora_rank") else min(ranks, int(config.get("num_key_value_heads") or ranks))
        dtype = flags.get("--kv-cache-dtype") or "auto"
        dtype = ("bfloat16" if arguments.model.bf16 else "float32") if dtype == "auto" else dtype
        per_token, room = (cache_bytes_per_token(config, dtype) or 0) // share, None
        if memory is not None and per_token:
            state_ratio = float(flags.get("--mamba-full-memory-ratio") or STATE_RATIO)
            share_of_cache = 1 / (1 + state_ratio) if state_bytes(config, dtype) else 1.0
            fraction = SHARED_GPU_FRACTION if arguments.cluster.colocate else STATIC_FRACTION
            static_bytes = memory * GIB * float(flags.get("--mem-fraction-static") or fraction)
            room = int(max(0, static_bytes - weights) * share_of_cache // per_token)
        yield EngineBytes(group=group, weights=weights, cache_per_token=per_token, cache_tokens=room, caches=caches)
