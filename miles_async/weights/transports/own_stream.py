"""A CUDA stream for sending weights during training on the same device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def sending_device(kind: str) -> torch.device:
    """The device that a rank sends from: its device 0, by number, as ``torch.cuda.set_device`` wants it."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


class OwnStream:
    """A separate stream, made once: what PyTorch caches for one stream is of no use to another.

    On the default stream, which all threads share, a copy would wait for the kernels that training has queued, and they
    for it. Does nothing on devices other than CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def used(self) -> AbstractContextManager[None]:
        """Run the block on the stream, in any thread."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return]
