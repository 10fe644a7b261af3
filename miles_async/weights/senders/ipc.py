"""Staged buckets in device memory that engines on the same device open by a CUDA IPC handle.

What SGLang's ``/update_weights_from_tensor`` (0.5.23, ``load_format`` "flattened_bucket") unpickles, made without
importing SGLang: the bucket as one uint8 tensor, and where each tensor is in it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from miles_async.types import TensorMeta
from miles_async.weights.senders.own_stream import own_stream
from miles_async.weights.staging import Staging, StagingOptions

_DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor


class IpcSender(Staging):
    """Implements WeightSender."""

    def __init__(self, staging: StagingOptions, *, device: torch.device) -> None:
        super().__init__(staging)
        self._device = device
        self._beside_training = own_stream(device)
        self._shared: Tensor | None = None

    def share_bucket(self, version: int, index: int) -> str:
        """Its handle. The memory stays until the next call, or :meth:`release`."""
        self.release()
        with self._beside_training:
            self._shared = self.bucket(version, index).to(self._device)
        return handles(self._shared, self.metas(version, index))

    def release(self) -> None:
        """Give the shared memory back; engines have copied what they need."""
        self._shared = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()
        super().close()


def handles(data: Tensor, tensors: Sequence[TensorMeta]) -> str:
    """``data``: uint8 [bytes], ``tensors`` one after another. Base64 of the pickle, since it travels in JSON."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _by_handle
    pickler.dump({"flattened_tensor": data, "metadata": _places(tensors)})
    return base64.b64encode(buffer.getvalue()).decode()


def _places(tensors: Sequence[TensorMeta]) -> list[SimpleNamespace]:
    """FlattenedTensorMetadata by its attributes; the class itself is not among those that SGLang unpickles."""
    places, start = [], 0
    for meta in tensors:
        dtype, shape = getattr(torch, meta.dtype), torch.Size(meta.shape)
        end = start + shape.numel() * dtype.itemsize
        places.append(
            SimpleNamespace(name=meta.name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    return places


def _by_handle(tensor: Tensor) -> tuple[Any, ...]:
    """The device by its UUID, as SGLang does on its side: an index means another device in another process."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
