"""In the server's process: one of several waiting requests computes their common prefix, before the others.

SGLang (0.5.23) caches prefixes, but requests that enter one batch all compute their common prefix. Its in-batch prefix
caching puts such requests behind others, and lets them in nevertheless if the batch has room. It is off while more than
128 requests wait, and leaves out requests that find more than 32 tokens in the cache, such as all that begin with one
chat template. So the samples of a group, which arrive together, each computed their prompt.
"""

from __future__ import annotations

from typing import Any

import torch

from miles_async.engines.sglang.hooks import hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def register() -> None:
    """Patch schedulers created from now on."""
    hook(f"{_SCHEDULER}.get_new_batch_prefill", _plan)


def _plan(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler.waiting_queue, later = divide(scheduler.waiting_queue, scheduler.tree_cache)
    try:
        return plan(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = scheduler.waiting_queue + later


def divide(waiting: list[Any], cache: Any) -> tuple[list[Any], list[Any]]:
    """Split requests into two lists: requests for the next batch, and requests that wait for their results.

    A request waits if an earlier one computes more than half of what it would compute itself: a few common tokens are
    not worth a separate batch. The first request never waits.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    finds_all = cache.supports_prefix_sharing() and not (cache.supports_swa() or cache.supports_mamba())
    if len(waiting) < 2 or not finds_all or cache.page_size != 1:
        return waiting, []  # they might wait in vain
    computed = RadixCache.create_simulated()
    now, later = [], []
    for request in waiting:
        tokens = request.origin_input_ids + request.output_ids
        key = RadixKey(token_ids=tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
        shared = computed.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        if shared:
            cached = cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            if 2 * (shared - cached) > len(tokens) - cached:
                later.append(request)
                continue
        computed.insert(InsertParams(key=key, value=torch.empty(len(tokens), dtype=torch.bool)))
        now.append(request)
    return now, later
