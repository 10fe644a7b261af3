"""Runs packed micro-batches through megatron's pipeline schedule: scoring without gradients, or with a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miles_async.backends.megatron.packing import PackedBatch
from miles_async.backends.megatron.scores import token_logprobs

LossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(micro-batch, logits [1, T, V / TP]) → (sum of the loss, int loss tokens, metric sums)."""


def score(modules: Sequence[Any], packs: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
    """Log-probs float32 [N] per micro-batch, on the last pipeline stage; empty on the others. Collective."""

    def logprobs_of(packed: PackedBatch, logits: Tensor) -> Tensor:
        return token_logprobs(logits, packed, temperature)

    with torch.no_grad(), _evaluating(modules):
        return _run(modules, packs, logprobs_of, forward_only=True)


def accumulate_gradients(
    modules: Sequence[Any], packs: Sequence[PackedBatch], loss: LossFunction
) -> list[dict[str, Tensor]]:
    """Forward and backward of one optimizer step; leaves gradients reduced over ranks and divided by loss tokens.

    Returns the metric sums per micro-batch on the last pipeline stage, nothing on the others. Collective.
    """
    return _run(modules, packs, loss, forward_only=False)


def _run(
    modules: Sequence[Any],
    packs: Sequence[PackedBatch],
    last_stage: Callable[[PackedBatch, Tensor], Any],
    *,
    forward_only: bool,
) -> list[Any]:
    def forward_step(batches: Iterator[PackedBatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        packed = next(batches)
        output = module(packed.tokens, packed.position_ids, None, packed_seq_params=packed.attention)
        # With forward_only the schedule passes non_loss_data=True and stores what comes back.
        return output, lambda logits, **_: last_stage(packed, logits)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(packs),
        model=list(modules),
        num_microbatches=len(packs),
        seq_length=max(packed.padded_length for packed in packs),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@contextlib.contextmanager
def _evaluating(modules: Sequence[Any]) -> Iterator[None]:
    were_training = [module.training for module in modules]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in zip(modules, were_training, strict=True):
            module.train(training)
