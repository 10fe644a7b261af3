"""Requests that begin alike don't compute their beginning several times: with SGLang's own cache of prefixes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

DIVIDE = """
import json, sys
from array import array
from types import SimpleNamespace

sys.argv = ["launcher", "--device", "cpu"]

import miles_async.engines.sglang.launcher  # first: makes SGLang importable
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry

from miles_async.engines.sglang.cpu.prefills import divide, _plan

def now(waiting, cached=(), version="1", **cache):
    tree = RadixCache.create_simulated(**cache)
    for tokens in cached:
        key = RadixKey(token_ids=array("q", tokens), extra_key="1")
        tree.insert(InsertParams(key=key, value=torch.empty(len(tokens), dtype=torch.bool)))
    requests = [
        SimpleNamespace(
            number=number,
            origin_input_ids=array("q", tokens[:1]),
            output_ids=array("q", tokens[1:]),
            extra_key=version,
            cache_salt=None,
        )
        for number, tokens in enumerate(waiting)
    ]
    first, later = divide(requests, tree)
    scheduler = SimpleNamespace(waiting_queue=requests, tree_cache=tree)
    def plan(scheduler):  # takes the first request of those that it sees
        scheduler.waiting_queue = scheduler.waiting_queue[1:]
        return "batch"
    assert _plan(plan, scheduler) == "batch"
    assert sorted(request.number for request in scheduler.waiting_queue) == list(range(1, len(requests)))
    assert len(first) + len(later) == len(requests)
    return [request.number for request in first]

assert "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill" in HookRegistry._hooks

template = list(range(100, 180))
prompts = [template + [number] * 10 for number in range(3)]
twice = [prompts[0], prompts[0], prompts[1], prompts[2], prompts[2]]
print(json.dumps({
    "nothing cached": now(twice),
    "template cached": now(twice, [template]),
    "a prompt cached": now(twice, [prompts[0]]),
    "all cached": now(twice, prompts),
    "cached for another version": now(twice, prompts, version="2"),
    "little in common": now([[1, 2, 3, 4], [1, 2, 5, 6]]),
    "much in common": now([[1, 2, 3, 4], [1, 2, 3, 6]]),
    "no cache": now(twice, disable=True),
    "pages": now(twice, page_size=16),
}))
"""


def test_a_batch_computes_once_what_waiting_requests_begin_with() -> None:
    ran = subprocess.run([sys.executable, "-c", DIVIDE], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "nothing cached": [0],
        "template cached": [0, 2, 3],
        "a prompt cached": [0, 1, 2, 3],
        "all cached": [0, 1, 2, 3, 4],
        "cached for another version": [0],
        "little in common": [0, 1],
        "much in common": [0],
        "no cache": [0, 1, 2, 3, 4],
        "pages": [0, 1, 2, 3, 4],
    }
