"""Sending takes place beside training, on the same device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def own_stream(device: torch.device) -> AbstractContextManager[None]:
    """What is done on ``device`` in this context, which may be entered again and again, does not wait for the kernels
    that training has queued, nor they for it: both would, on the default stream that all threads share.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-any-return]
