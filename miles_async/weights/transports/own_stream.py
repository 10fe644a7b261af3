"""A CUDA stream for sending weights during training on the same device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def own_stream(device: torch.device) -> AbstractContextManager[None]:
    """Run the block on a separate stream; the context may be entered many times.

    On the default stream, which all threads share, it would wait for the kernels that training has queued, and they
    for it. A no-op on devices other than CUDA.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-any-return]
