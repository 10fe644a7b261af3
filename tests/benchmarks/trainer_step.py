"""What a trainer step costs beside a bare Megatron loop on the same batch: packing, log-probs in chunks, the objective
and its metrics, limits. CPU seconds of the one rank, by turns with the bare loop, in fp32 on one thread.

The bare loop has its micro-batches packed beforehand, takes the logits of all positions from Megatron's model, and
minimises the clipped ratio, with Megatron's own schedule, optimizer and clipping.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.report import Row

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from miles_async.arguments.model import ModelArguments
    from miles_async.backends.megatron.packing.pack import PackedBatch
    from miles_async.types import TrainShard

SIZES = {"vocab_size": 4096, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
WIDTH, LENGTH, MICRO_BATCHES = 256, 256, 2  # hidden size; tokens of a sample
SAMPLES = 8  # per micro-batch
RESPONSES = (0.5, 1.0)  # share of the tokens that carries loss
TURNS = 6  # the fastest counts


def rows() -> Iterator[Row]:
    """By the share of tokens that carries loss."""
    from tests.integration.rank_processes import run_ranks
    from tests.integration.tiny_models import save_tiny

    with tempfile.TemporaryDirectory() as scratch:
        model = save_tiny("qwen3", Path(scratch) / "model", hidden_size=WIDTH, **SIZES)
        for share in RESPONSES:
            yield run_ranks(1, _measure, model, share, timeout=500)[0]


def _measure(rank: int, world_size: int, store: dist.Store, model: Path, share: float) -> Row:
    from tests.integration.megatron_scenario import Layout, make_backend

    backend = make_backend(rank, world_size, store, model, Layout(), logprob_chunk=1024)
    shard = _shard(share)
    bare = _bare_loop(backend._model_arguments, shard)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(TURNS):
        for name, step in (("ours", partial(backend.train, shard)), ("bare", bare)):
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    backend.close()
    ours, plain = min(seconds["ours"][1:]), min(seconds["bare"][1:])
    return {
        "tokens": MICRO_BATCHES * SAMPLES * LENGTH,
        "share_with_loss": share,
        "bare_s": round(plain, 3),
        "ours_s": round(ours, 3),
        "ratio": round(ours / plain, 3),
    }


def _shard(share: float) -> TrainShard:
    import numpy as np

    from tests.integration.toy_batches import VERSION, ToySample, to_shards

    draw = np.random.default_rng(0)
    mask = (np.arange(LENGTH) >= round(LENGTH * (1 - share))).astype(np.uint8)
    samples = [
        ToySample(
            tokens=draw.integers(0, SIZES["vocab_size"], LENGTH).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.full(LENGTH, -8.0, np.float32) * mask,
            weight_versions=np.where(mask, VERSION, -1).astype(np.int32),
            advantage=float(draw.normal()),
        )
        for _ in range(MICRO_BATCHES * SAMPLES)
    ]
    return to_shards([samples], dp_size=1, micro_batches=MICRO_BATCHES)[0]


def _bare_loop(arguments: ModelArguments, shard: TrainShard) -> Callable[[], None]:
    """One optimizer step of a model of its own."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from miles_async.arguments.optimizer import OptimizerArguments
    from miles_async.backends.megatron.model.build import load_model
    from miles_async.backends.megatron.optimizer import Training, make_optimizer
    from miles_async.backends.megatron.packing.pack import PackLayout, pack_batch
    from miles_async.backends.megatron.platform import Platform
    from tests.integration.megatron_scenario import LR

    assert arguments.hf_checkpoint is not None
    platform = Platform.cpu()
    loaded = load_model(arguments.hf_checkpoint, arguments, platform, trainable=True)
    [module] = loaded.modules
    del module.module.output_layer.__dict__["forward"]  # type: ignore[union-attr]  # Megatron's own gives logits
    training = Training(
        model=arguments,
        optimizer=OptimizerArguments(lr=LR),
        platform=platform,
        device=torch.device("cpu"),
        total_steps=100,
    )
    optimizer, scheduler = make_optimizer(loaded.modules, training)
    packs = [pack_batch(batch, 0, PackLayout(), torch.device("cpu")) for batch in shard.optimizer_steps[0]]

    def forward(packed: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[torch.Tensor, object]:
        each = next(packed)
        labels = each.tokens.roll(-1, -1)
        misses = model(each.tokens, each.position_ids, None, labels=labels, packed_seq_params=each.attention)
        return misses, partial(_loss, each)

    def step() -> None:
        module.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packs),
            model=loaded.modules,
            num_microbatches=len(packs),
            seq_length=packs[0].tokens.shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(1)

    return step


def _loss(packed: PackedBatch, misses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    mask, advantages = packed.batch.loss_mask[1:], packed.batch.advantages[1:]
    logprobs = -misses[0, : len(mask)]
    ratio = torch.exp(logprobs - logprobs.detach())
    losses = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    loss = (losses * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach()}
