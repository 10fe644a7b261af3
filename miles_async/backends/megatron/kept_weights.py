"""Weights of earlier versions on the host, to score tokens by the weights that sampled them.

Guan et al., "Missing Old Logits in Asynchronous Agentic RL" (arXiv 2605.12070): π / π_rollout is the product of π /
π_old, which says how far the policy has moved, and π_old / π_rollout, by which the trainer and the engine differ about
the same weights. Only with the trainer's log-probs under the very version that sampled a token does each factor mean
that. Their paper, known from descriptions by others, has an exact way and approximations. This is the exact one: it
keeps the weights of earlier versions and scores every token by its own version.

A token whose version is not kept (of an earlier run) is scored by the oldest kept version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.backends.megatron.host_buffer import HostBuffer

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(kw_only=True, slots=True)
class KeptWeights:
    """This rank's trained weights and floating-point buffers at the last versions."""

    modules: Sequence[Module]
    most: int  # versions
    of_version: dict[int, list[Tensor]] = field(default_factory=dict)  # ascending; copies on the host
    _memory: dict[int, HostBuffer] = field(default_factory=dict)  # of each version
    _present: HostBuffer = field(default_factory=HostBuffer)  # the model's weights while it has others

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the present weights as this version, in place of the oldest beyond ``most``."""
        full = version not in self.of_version and len(self.of_version) == self.most
        replaced = min(self.of_version) if full else version
        self.of_version.pop(replaced, None)
        memory = self._memory.pop(replaced, None) or HostBuffer()
        self._memory[version], self.of_version[version] = memory, memory.copy([*self._tensors()])

    def scoring(self, versions: Tensor) -> Tensor:
        """The kept version that scores tokens of each of these versions, int64 [n]: itself, or the next kept one."""
        kept = torch.tensor(sorted(self.of_version), device=versions.device)
        return kept[torch.bucketize(versions, kept).clamp(max=len(kept) - 1)]

    @contextlib.contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Load the weights of a kept version, bitwise, and restore the present ones afterwards."""
        present = self._present.copy([*self._tensors()])
        try:
            self._load(self.of_version[version])
            yield
        finally:
            self._load(present)

    @torch.no_grad()
    def _load(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value, non_blocking=True)  # pinned memory is used again after that only

    def _tensors(self) -> Iterator[Tensor]:
        for module in map(unwrap_model, self.modules):
            yield from (parameter.detach() for parameter in module.parameters() if parameter.requires_grad)
            yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())
