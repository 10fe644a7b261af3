"""Weights on their way from the trainer to engines, and what engines hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from miles_async.types.samples import Float32

GroupBackend = Literal["gloo", "nccl"]
"""Backend of a torch process group."""


class TensorMeta(msgspec.Struct, frozen=True):
    """Name, dtype (torch name without prefix: "float32") and shape of one exported HF tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""  # ``tensor_digest`` of its elements; empty if not compared


class WeightDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Changes since an earlier version: next to each bucket's file one with its changed tensors, encoded."""

    base_version: int
    bucket_bytes: dict[int, int]  # of each bucket's file; 0: nothing changed, and there is none


class StagedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of staged weights and the expected canary scores; or one sender's share of it.

    Its files: ``weights/files.py``. It is their manifest, too, without the canary.
    """

    version: int
    directory: str  # where sender 0 sees its files
    buckets: dict[int, tuple[TensorMeta, ...]]  # in sending order; one file each, tensors in the order of their bytes
    total_bytes: int
    senders: int = 1  # bucket i was staged by sender i % senders, and is sent by it
    delta: WeightDelta | None = None
    canary_tokens: tuple[int, ...] = ()
    canary_logprobs: tuple[float, ...] = ()  # of canary_tokens[1:], by the trainer, with these weights
    previous_canary_logprobs: tuple[float, ...] = ()  # with those it staged before; empty if these are the first
    copy_seconds: float = 0.0  # that training waited: export, copy, canary; longest of the senders
    prepare_seconds: float = 0.0  # and until the files were there


class CanaryScore(msgspec.Struct, frozen=True):
    """An engine's log-probs of given tokens: the canary sequence, or a sample for a teacher."""

    weight_version: str
    logprobs: Float32  # [T - first] of tokens[first:]; of the canary tokens[1:]


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an HF tensor where one rank of an engine holds it.

    Its element [i, j, ...] is element offset + i · strides[0] + j · strides[1] + ... of the tensor, row by row.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # in which it is held
    digest: str  # of these elements in their places, see ``tensor_digest``; "" if not asked for


class TensorShare(msgspec.Struct, frozen=True):
    """Every ``of``-th tensor, by its name: each is in exactly one of the shares 0 .. ``of`` - 1."""

    index: int = 0
    of: int = 1

    def includes(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.of == self.index


class HeldWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an engine's model as it reports them, over all its ranks or for one of them."""

    parts: Mapping[str, tuple[HeldPart, ...]]  # by name of the tensor that its loader was given
    other_form: tuple[str, ...] = ()  # tensors that were loaded and are kept otherwise than they were sent
    unfilled: Mapping[str, int] = {}  # parameters of the model → elements that no tensor was copied to, other than 0


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one publication."""

    version: int  # the version that became visible
    sent_version: int  # differs from version only under --debug-publication-lag
    engines: tuple[str, ...]
    fenced: tuple[str, ...]
    copy_seconds: float  # that training waited
    prepare_seconds: float  # with them, all until the pause
    pause_seconds: float
    step_seconds: Mapping[str, float]  # of the pause, by step: "flush", "send", ...
    canary_difference: float  # mean over tokens, largest over engines; 0 when not verified
    canary_undecided: tuple[str, ...] = ()  # engines whose canary fits this version and the one before alike
    compared_tensors: int = 0  # whose elements were compared; least over engines
    incomparable_tensors: int = 0  # that can't be compared, or are skipped; most over engines
    total_bytes: int = 0  # of the weights
    sent_fraction: float = 1.0  # of these bytes, what each engine was sent; mean over engines
