"""Free a rank's memory for engines on the same GPU, and restore it (``--colocate``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_async.backends.megatron.optimizer import parts_of

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from torch.nn import Module


class HostStorages:
    """Contents of tensors on the host, while their device memory is freed. The tensors and their views remain the same
    objects.
    """

    def __init__(self, tensors: Iterable[Tensor], *, scratch: Iterable[Tensor] = ()) -> None:
        """Copy the contents and free the memory. ``scratch``: tensors whose contents are not needed."""
        kept = _storages(tensors)
        self._storages = _storages(scratch) | kept
        self._copies = {
            place: storage.clone() if storage.device.type == "cpu" else storage.cpu() for place, storage in kept.items()
        }
        self._sizes = {place: storage.nbytes() for place, storage in self._storages.items()}
        for storage in self._storages.values():
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again and copy the contents back."""
        for place, storage in self._storages.items():
            storage.resize_(self._sizes[place])
            if place in self._copies:
                storage.copy_(self._copies[place])


def model_tensors(modules: Sequence[Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for module in modules:
        yield from module.parameters()
        for part in module.modules():
            yield from (buffer for buffer in part._buffers.values() if buffer is not None)


def gradients(modules: Sequence[Module]) -> Iterator[Tensor]:
    """The buffers that Megatron accumulates gradients in: zeroed when the next optimizer step begins."""
    for module in modules:
        yield from (parameter.main_grad for parameter in module.parameters() if hasattr(parameter, "main_grad"))


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """fp32 main parameters and moments."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Map addresses to storages. Several tensors may be views of one."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
