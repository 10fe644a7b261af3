"""The loop of ``--on-policy``, written plainly: sample, compare, train, publish, strictly in turn.

A real SGLang server is asked for one sample at a time, the real Megatron backend trains all samples as one pack, and
weights go to the server as Hugging Face files. Nothing else of the system takes part: no router, dispatcher, pool,
conversion, packing, weight transport.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from miles_async.arguments import Arguments
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.types import NOT_SHOWN, Prompt, TrainBatch, TrainShard
from miles_async.wiring.trainer_process import make_backend

REQUEST_SECONDS = 60

Step = tuple[TrainShard, dict[str, float]]  # what was trained, and what the backend says about it


def plain_loop(
    rank: int, size: int, store: dist.Store, url: str, arguments: Arguments, prompts: Sequence[Prompt], files: Path
) -> list[Step]:
    """Runs in a process of its own (``rank_processes``). ``prompts``: of all steps, one batch after the other."""
    backend = make_backend(arguments, "cpu", {}, NodeFiles(), rank=rank, world_size=size, local_rank=0, store=store)
    rollout, steps = arguments.rollout, []
    for version in range(rollout.num_rollout):
        batch_prompts = prompts[version * rollout.rollout_batch_size :][: rollout.rollout_batch_size]
        batch = _batch(url, batch_prompts, rollout.n_samples_per_prompt, rollout.rollout_max_response_len, version)
        loss_tokens = (int(batch.loss_mask.sum()),)
        shard = TrainShard(target_version=version, optimizer_steps=((batch,),), loss_tokens=loss_tokens)
        steps.append((shard, backend.train(shard)))
        backend.save_hf(files / str(version + 1))
        # A request's answer comes before its batch is taken down, and an update is refused until then.
        _post(url, f"/flush_cache?timeout={REQUEST_SECONDS}", {})
        _post(url, "/update_weights_from_disk", {"model_path": str(files / str(version + 1))})
    return steps


def _batch(url: str, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int, version: int) -> TrainBatch:
    tokens, masks, logprobs, advantages, rewards = [], [], [], [], []
    for prompt in prompts:
        ids, group_rewards = list(prompt.token_ids), []
        for _ in range(group_size):
            sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            reply = _post(url, "/generate", body)
            tokens.append(ids + reply["output_ids"])
            masks.append([0] * len(ids) + [1] * len(reply["output_ids"]))
            logprobs.append([0.0] * len(ids) + [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
            right = reply["text"].strip() == prompt.label and reply["meta_info"]["finish_reason"]["type"] == "stop"
            group_rewards.append(1.0 if right else 0.0)
        deviation = np.std(group_rewards, ddof=1)
        advantages += [(reward - np.mean(group_rewards)) / (deviation + 1e-4) for reward in group_rewards]
        rewards += group_rewards
    mask, size = np.concatenate(masks), len(tokens)
    return TrainBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
        loss_mask=mask.astype(np.uint8),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
        weight_versions=np.where(mask, version, -1).astype(np.int32),
        oldest_versions=np.full(size, version, np.int32),
        advantages=np.array(advantages, np.float32),
        rewards=np.array(rewards, np.float32),
        sample_ids=np.arange(size, dtype=np.int64),
        group_ids=np.repeat(np.arange(len(prompts), dtype=np.int64), group_size),
        shown=np.full(size, NOT_SHOWN),
    )


def _post(url: str, path: str, body: dict[str, object]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: expected 200, found {error.code}: {error.read()!r}") from error
    return json.loads(text) if text.startswith(b"{") else text
