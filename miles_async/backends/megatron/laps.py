"""Durations of the parts of a rollout step on this rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch.nn import Module


class Laps:
    """Marks between parts. On a GPU they are events of its stream, not waited for before :meth:`seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # (the part that ends there, seconds or event)

    def begin(self) -> None:
        self._marks = []
        self.end("")

    def end(self, part: str) -> None:
        """End a part, which began at the mark before."""
        if not self._on_gpu:
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def watch_reduction(self, module: Module) -> None:
        """Separate a model's forward and backward passes, which differ between ranks, from the wait for other ranks."""
        config = get_model_config(module)
        finalize = config.finalize_model_grads_func

        def timed(*arguments: Any, **options: Any) -> None:
            self.end("forward and backward")
            finalize(*arguments, **options)
            self.end("reducing gradients")

        config.finalize_model_grads_func = timed

    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, summed where parts alternate. Waits until the device has reached the last mark."""
        found: defaultdict[str, float] = defaultdict(float)
        for (_, before), (part, mark) in pairwise(self._marks):
            if self._on_gpu:
                mark.synchronize()
            found[part] += before.elapsed_time(mark) / 1e3 if self._on_gpu else mark - before
        return dict(found)
