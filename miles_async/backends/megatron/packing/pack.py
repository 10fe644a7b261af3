"""Pack several samples into one sequence (THD), the input of a megatron forward pass.

Samples are concatenated; ``cu_seqlens`` keeps attention and positions inside each. A padding tail, itself a sequence
without loss, rounds T up to what sequence parallelism needs.

With ``--share-prefixes``, samples that begin with the same tokens share the positions of these (``shared_prefixes``),
each of which predicts a token of every sample. The last token of a sample, from which nothing follows, has no position.

Under context parallelism every sample is padded to a multiple of 2 × ranks, and each rank gets its part of every sample
(``positions``). The model's input is split; arrays for the loss are whole on every rank, in the order of the
tokens, and each rank knows which tokens' log-probs come from its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles_async.api import Need, TokenBatch
from miles_async.backends.megatron.packing.images import Images, images_of
from miles_async.backends.megatron.packing.positions import positions_of_rank, share_places
from miles_async.backends.megatron.packing.routing_replay import Experts, RoutingLayout, replayed_experts
from miles_async.backends.megatron.packing.shared_prefixes import SharedPrefixes
from miles_async.runtime.picture_processor import PictureProcessor
from miles_async.train_data.batch import per_branch, token_advantages
from miles_async.types import NOT_SHOWN, Picture, RoutedExperts, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch: N tokens of sequences; T positions with padding, T / CP of them on this rank. T is less than N
    where prefixes are shared.
    """

    tokens: Tensor  # int64 [1, T / CP]
    position_ids: Tensor  # int64 [1, T / CP], from 0 in every sample
    scored: Tensor  # int64 [n]: tokens in [0, N) whose log-probs are needed and come from this rank's positions
    rows: Tensor  # int64 [m], m <= n: the positions in [0, T / CP) that predict them
    row_of: Tensor  # int64 [n], in [0, m): which of these positions predicts which token
    labels: Tensor  # int64 [n]: these tokens
    attention: PackedSeqParams  # of all T positions
    num_tokens: int  # N
    experts: Experts | None = None  # to replay, of the positions that this rank's routers see; None: they choose
    loss_inputs: TokenBatch | None = None  # None: scored only
    returns: Tensor | None = None  # float32 [N], for a critic, on the last pipeline stage
    images: Images | None = None  # None: the model reads none
    shown: Mapping[int, slice] = field(default_factory=dict)  # branch whose scores are wanted → its tokens

    @property
    def batch(self) -> TokenBatch:
        """Inputs of the loss."""
        assert self.loss_inputs is not None, "packed to be scored only"
        return self.loss_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLayout:
    """The form in which ranks need a packed sequence."""

    share: int = 1  # ranks that split each context-parallel rank's positions by sequence parallelism
    context_size: int = 1  # context-parallel ranks
    context_rank: int = 0
    share_prefixes: bool = False  # without context parallelism only
    routing: RoutingLayout | None = None  # None: nothing is replayed
    pictures: PictureProcessor | None = None  # None: the model reads no images


def pack_batch(batch: TrainBatch, target_version: int, layout: PackLayout, device: torch.device) -> PackedBatch:
    """Pack a micro-batch to train on from ``target_version``; the trainer has computed nothing for it yet."""
    carries_loss = batch.loss_mask != 0
    oldest_versions = np.repeat(batch.oldest_versions, np.diff(batch.offsets))
    computed: dict[Need, Tensor] = {}
    if batch.teacher_logprobs is not None:
        computed["teacher_logprobs"] = _tensor(batch.teacher_logprobs, torch.float32, device)
    packed = _pack(
        batch.tokens, batch.offsets, carries_loss, layout, device, batch.pictures or (), experts=batch.routed_experts
    )
    return replace(
        packed,
        loss_inputs=TokenBatch(
            tokens=_tensor(batch.tokens, torch.int64, device),
            offsets=_tensor(batch.offsets, torch.int64, device),
            loss_mask=_tensor(carries_loss, torch.float32, device),
            advantages=_tensor(token_advantages(batch), torch.float32, device),
            per_token=not per_branch(batch),
            rewards=_tensor(batch.rewards, torch.float32, device),
            group_ids=_tensor(batch.group_ids, torch.int64, device),
            rollout_logprobs=_tensor(np.where(carries_loss, batch.rollout_logprobs, 0.0), torch.float32, device),
            weight_versions=_tensor(batch.weight_versions, torch.int64, device),
            oldest_versions=_tensor(oldest_versions, torch.int64, device),
            target_version=target_version,
            computed=computed,
        ),
        shown=_shown(batch),
    )


def _shown(batch: TrainBatch) -> dict[int, slice]:
    tokens = [slice(first, end) for first, end in pairwise(batch.offsets.tolist())]
    return {branch: own for branch, own in zip(batch.shown.tolist(), tokens, strict=True) if branch != NOT_SHOWN}


def pack_sequences(
    sequences: Sequence[Sequence[int]],
    layout: PackLayout,
    device: torch.device,
    pictures: Sequence[tuple[Picture, ...]] = (),
) -> PackedBatch:
    """Pack token sequences, and the images of each if any has some, to score all their tokens."""
    offsets = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    tokens = np.fromiter((token for sequence in sequences for token in sequence), dtype=np.int64, count=offsets[-1])
    return _pack(tokens, offsets, np.ones(len(tokens), dtype=bool), layout, device, pictures)


def pack_filler(layout: PackLayout, device: torch.device) -> PackedBatch:
    """Pack an empty micro-batch, with experts if they are replayed."""
    nothing = np.zeros(0, dtype=np.int64)
    experts = None
    if (routing := layout.routing) is not None:
        experts = np.zeros((0, (max(routing.layers, default=-1) + 1) * routing.topk), dtype=np.int16)
    return _pack(nothing, np.zeros(1, dtype=np.int64), nothing.astype(bool), layout, device, experts=experts)


def _pack(
    tokens: np.ndarray,
    offsets: np.ndarray,
    needed: np.ndarray,
    layout: PackLayout,
    device: torch.device,
    pictures: Sequence[tuple[Picture, ...]] = (),
    *,
    experts: RoutedExperts | None = None,
) -> PackedBatch:
    """``needed``: bool [N], the tokens that get a log-prob if a prefix predicts them."""
    shown = images_of(tokens, offsets, pictures, layout.pictures)
    lengths = np.diff(offsets)
    depths = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)
    shared, read = None, np.ones(len(tokens), dtype=bool)  # tokens that the model reads
    if layout.share_prefixes and experts is None:  # engines may have read a prompt with different experts
        shared = share_places(tokens, offsets)
        boundaries, read = _padded_boundaries(np.array([shared.own.sum()]), layout), shared.read
        places = np.full(len(tokens), -1)  # [N], in [0, T)
        places[read] = shared.places
        positions = np.zeros(boundaries[-1], dtype=np.int64)
        positions[shared.places] = depths[read]
    else:
        boundaries = _padded_boundaries(lengths, layout)
        places = depths + np.repeat(boundaries[: len(lengths)], lengths)
        positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], np.diff(boundaries))
    all_tokens = np.zeros(boundaries[-1], dtype=np.int64)
    all_tokens[places[read]] = tokens[read]
    if layout.pictures is not None:  # responses may end at a token that stands for an image: the model need not read it
        all_tokens[places[offsets[1:] - 1]] = 0
    held = positions_of_rank(boundaries, layout.context_size, layout.context_rank)
    held_row = np.full(boundaries[-1], -1)
    held_row[held] = np.arange(len(held))
    scored = np.flatnonzero(needed & (depths > 0))
    rows = held_row[places[scored - 1]]
    scored, rows = scored[rows >= 0], rows[rows >= 0]
    rows, row_of = np.unique(rows, return_inverse=True)
    attention = _sequences(boundaries, device)
    if shared is not None:
        attention = SharedPrefixes(
            **vars(attention),
            samples=_tensor(shared.samples, torch.int32, device),
            places=_tensor(shared.places, torch.int64, device),
            own=_tensor(shared.own, torch.int64, device),
        )
    replayed = None
    if experts is not None and layout.routing is not None:
        token_at = np.full(boundaries[-1], -1)
        token_at[places] = np.arange(len(tokens))
        token_at[places[offsets[1:] - 1]] = -1  # no engine has read the last token, and nothing follows from it
        replayed = replayed_experts(experts, token_at[held], layout.routing)
    images = None
    if layout.pictures is not None:
        images = Images(
            pictures=shown,
            processor=layout.pictures,
            positions=positions,
            boundaries=boundaries,
            places=np.flatnonzero(all_tokens == layout.pictures.image_token),
            held=held,
        )
    return PackedBatch(
        tokens=_tensor(all_tokens[held], torch.int64, device)[None],
        position_ids=_tensor(positions[held], torch.int64, device)[None],
        scored=_tensor(scored, torch.int64, device),
        rows=_tensor(rows, torch.int64, device),
        row_of=_tensor(row_of, torch.int64, device),
        labels=_tensor(tokens[scored], torch.int64, device),
        attention=attention,
        num_tokens=len(tokens),
        experts=replayed,
        images=images,
    )


def _sequences(boundaries: np.ndarray, device: torch.device) -> PackedSeqParams:
    cu_seqlens = _tensor(boundaries, torch.int32, device)
    longest = int(np.diff(boundaries).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        seq_idx=_tensor(np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries)), torch.int32, device)[None],
    )


def _padded_boundaries(lengths: np.ndarray, layout: PackLayout) -> np.ndarray:
    """Boundaries of the sequences and the padding tail, if any, int64; the last one is T."""
    chunks = 2 * layout.context_size if layout.context_size > 1 else 1
    ends = np.cumsum(-(-lengths // chunks) * chunks)
    total = int(ends[-1]) if len(ends) else 0
    multiple = chunks * layout.share
    end = max(multiple, -(-total // multiple) * multiple)
    return np.concatenate([[0], ends, [end] if end > total else []]).astype(np.int64)


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A copy, always: arrays from Ray's object store are read-only, tensors must not be.
    return torch.tensor(array, dtype=dtype, device=device)
