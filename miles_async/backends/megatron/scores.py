"""Log-probs and entropy of tokens from vocab-parallel logits.

Aligned with tokens: entry ``i`` describes ``tokens[i]`` given its prefix and is 0 at each sample's first token.
The shift from "position i predicts token i + 1" happens here and nowhere else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from miles_async.backends.megatron.packing import PackedSequences

ENTROPY_ROWS = 4096  # rows of logits per pass, which bounds the temporary memory


def token_logprobs(logits: Tensor, packed: PackedSequences, temperature: float) -> Tensor:
    """Log-probs, float32 [N], differentiable. ``logits``: [1, T, V / TP], at temperature 1."""
    # The division makes a copy, which vocab_parallel_cross_entropy overwrites.
    scaled = logits.float() / temperature
    return _of_next_token(-vocab_parallel_cross_entropy(scaled, packed.labels)[0], packed)


@torch.no_grad()
def token_entropy(logits: Tensor, packed: PackedSequences, temperature: float) -> Tensor:
    """Entropy of the distribution that each token was drawn from, float32 [N], no gradient."""
    rows = [_entropy(chunk.float() / temperature) for chunk in logits[0].split(ENTROPY_ROWS)]
    return _of_next_token(torch.cat(rows), packed)


def _of_next_token(values: Tensor, packed: PackedSequences) -> Tensor:
    """Shift values [T] of predicting positions to the tokens they predict, [N]."""
    shifted = torch.cat([values.new_zeros(1), values[:-1]])[: packed.num_tokens]
    return shifted.masked_fill(packed.is_first, 0.0)


def _entropy(logits: Tensor) -> Tensor:
    """H = log Z − Σ p·z over the whole vocabulary, [rows, V / TP] → [rows]."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest
    weights = logits.exp()
    sums = torch.stack([weights.sum(-1), (weights * logits).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
