"""Pack several samples into one sequence (THD), the input of a megatron forward pass.

The samples stand one behind another in a sequence of shape [1, T]; ``cu_seqlens`` keeps attention and positions
inside each. A padding tail, itself a sequence without loss, rounds T up to what sequence parallelism needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles_async.api import TokenBatch
from miles_async.train_data.batch import token_advantages
from miles_async.types import TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequences:
    """One forward pass on the device. N tokens of sequences, T >= N with the padding tail."""

    tokens: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T], from 0 in every sample
    scored: Tensor  # int64 [n]: the tokens whose log-probs are needed, in [0, N); none is the first of its sequence
    rows: Tensor  # int64 [n]: the positions in [0, T) that predict them
    labels: Tensor  # int64 [n]: these tokens
    attention: PackedSeqParams
    num_tokens: int  # N

    @property
    def padded_length(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch to train on: for the model, and for the loss."""

    sequences: PackedSequences
    batch: TokenBatch
    loss_tokens: int


def pack_batch(batch: TrainBatch, *, align: int, device: torch.device) -> PackedBatch:
    """Pack a micro-batch, with nothing computed yet. T is a positive multiple of ``align``."""
    carries_loss = batch.loss_mask != 0
    oldest_versions = np.repeat(batch.oldest_versions, np.diff(batch.offsets))
    return PackedBatch(
        sequences=_pack(batch.tokens, batch.offsets, carries_loss, align=align, device=device),
        batch=TokenBatch(
            tokens=_tensor(batch.tokens, torch.int64, device),
            offsets=_tensor(batch.offsets, torch.int64, device),
            loss_mask=_tensor(carries_loss, torch.float32, device),
            advantages=_tensor(token_advantages(batch), torch.float32, device),
            rewards=_tensor(batch.rewards, torch.float32, device),
            rollout_logprobs=_tensor(np.where(carries_loss, batch.rollout_logprobs, 0.0), torch.float32, device),
            weight_versions=_tensor(batch.weight_versions, torch.int64, device),
            oldest_versions=_tensor(oldest_versions, torch.int64, device),
            computed={},
        ),
        loss_tokens=int(np.count_nonzero(carries_loss)),
    )


def pack_sequences(sequences: Sequence[Sequence[int]], *, align: int, device: torch.device) -> PackedSequences:
    """Pack token sequences, of which all tokens are scored."""
    offsets = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    tokens = np.fromiter((token for sequence in sequences for token in sequence), dtype=np.int64, count=offsets[-1])
    return _pack(tokens, offsets, np.ones(len(tokens), dtype=bool), align=align, device=device)


def _pack(
    tokens: np.ndarray, offsets: np.ndarray, needed: np.ndarray, *, align: int, device: torch.device
) -> PackedSequences:
    """``needed``: bool [N], the tokens that get a log-prob if a prefix predicts them."""
    total = len(tokens)
    padded = max(align, -(-total // align) * align)
    boundaries = np.append(offsets, padded) if padded > total else np.asarray(offsets)
    lengths = np.diff(boundaries)
    all_tokens = np.zeros(padded, dtype=np.int64)
    all_tokens[:total] = tokens
    positions = np.arange(padded) - np.repeat(boundaries[:-1], lengths)
    scored = np.flatnonzero(needed & (positions[:total] > 0))
    cu_seqlens = _tensor(boundaries, torch.int32, device)
    longest = int(lengths.max())
    return PackedSequences(
        tokens=_tensor(all_tokens, torch.int64, device)[None],
        position_ids=_tensor(positions, torch.int64, device)[None],
        scored=_tensor(scored, torch.int64, device),
        rows=_tensor(scored - 1, torch.int64, device),
        labels=_tensor(tokens[scored], torch.int64, device),
        attention=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        num_tokens=total,
    )


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A copy, always: arrays from Ray's object store are read-only, tensors must not be.
    return torch.tensor(array, dtype=dtype, device=device)
