"""The sending rank's half of ``ipc``: staged buckets in device memory, opened by engines through CUDA IPC handles.

A handle is what SGLang's ``/update_weights_from_tensor`` (0.5.23, ``load_format`` "flattened_bucket") unpickles, made
without importing SGLang: the bucket as one uint8 tensor, and where each tensor is in it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from miles_async.types import TensorMeta
from miles_async.weights.staging import Staging
from miles_async.weights.transports.own_stream import OwnStream, sending_device
from miles_async.weights.transports.spec import RankSide

_DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor


class IpcSender(Staging):
    """Implements SharesMemory, which describes its methods."""

    def __init__(self, side: RankSide) -> None:
        super().__init__(side.staging)
        self._device = sending_device(side.device)
        self._copying = OwnStream(self._device)
        self._shared: dict[str, Tensor] = {}

    def share_bucket(self, name: str, version: int, index: int) -> str:
        self.release(name)
        with self._copying.used():
            shared = self._shared[name] = self.on_device(version, index, self._device)
        return handles(shared, self.metas(version, index))

    def release(self, name: str) -> None:
        self._shared.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        for name in list(self._shared):
            self.release(name)
        super().close()


def handles(data: Tensor, tensors: Sequence[TensorMeta]) -> str:
    """Base64 of the pickle, since it travels in JSON. ``data``: uint8 [bytes], ``tensors`` one after another."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _by_handle
    pickler.dump({"flattened_tensor": data, "metadata": _places(tensors)})
    return base64.b64encode(buffer.getvalue()).decode()


def _places(tensors: Sequence[TensorMeta]) -> list[SimpleNamespace]:
    """SGLang's FlattenedTensorMetadata by its attributes: it doesn't unpickle the class itself."""
    places, start = [], 0
    for meta in tensors:
        dtype, shape = getattr(torch, meta.dtype), torch.Size(meta.shape)
        end = start + shape.numel() * dtype.itemsize
        places.append(
            SimpleNamespace(name=meta.name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    return places


def _by_handle(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    """Name the device by its UUID, as SGLang does on its side: an index means another device in another process."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
