"""What the GPU tests share: why one is skipped, what they measure, and how. All of it works on a CPU, too."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from miles_async.backends.megatron.memory.live_bytes import LiveBytes
from miles_async.backends.megatron.model.vocab_logprobs import VocabSettings, vocab_logprobs

Figure = dict[str, str | float]


@dataclass
class Figures:
    """Measurements of one session on one device."""

    device: str
    torch: str
    measured: dict[str, list[Figure]] = field(default_factory=dict)

    def add(self, name: str, **figure: str | float) -> None:
        self.measured.setdefault(name, []).append(figure)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{re.sub(r'[^A-Za-z0-9]+', '-', self.device)}.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def why_not(modules: Iterable[str]) -> str | None:
    """Reason to skip a test that needs CUDA and ``modules``; None if all is there."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    absent = [name for name in modules if not importlib.util.find_spec(name.partition(".")[0])]
    return f"not installed: {', '.join(absent)} (docs/gpu_tests.md)" if absent else None


def seconds_of(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Best of several, after one that warms up."""
    best = float("inf")
    for repeat in range(1 + repeats):
        _wait_for(device)
        started = time.perf_counter()
        work()
        _wait_for(device)
        if repeat:
            best = min(best, time.perf_counter() - started)
    return best


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Most bytes that ``work`` has allocated at one time, beyond what was there."""
    if device == "cpu":
        with LiveBytes(()) as live:
            work()
        return live.most
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Head:
    """An output layer and the tokens that it scores."""

    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype

    def logits_bytes(self, tokens: int) -> int:
        """Of fp32 logits of so many tokens."""
        return 4 * tokens * self.vocabulary

    def make(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, weight, labels."""
        draw = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(self.tokens, self.width, generator=draw, device=device, dtype=self.dtype)
        weight = torch.randn(self.vocabulary, self.width, generator=draw, device=device, dtype=self.dtype)
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=draw, device=device)
        return hidden.requires_grad_(), weight.mul_(0.02).requires_grad_(), labels


def chunked_step(inputs: tuple[Tensor, Tensor, Tensor], chunk: int) -> list[Tensor]:
    """Log-probs in chunks; gradients of hidden states and weight."""
    hidden, weight, labels = inputs
    logprobs, _ = vocab_logprobs(hidden, weight, labels, VocabSettings(temperature=1.0, chunk=chunk))
    return _with_gradients(logprobs, inputs)


def plain_step(inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The same from all logits at one time."""
    hidden, weight, labels = inputs
    logits = (hidden @ weight.t()).float()
    return _with_gradients(torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0], inputs)


def _with_gradients(logprobs: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    return [logprobs.detach(), *torch.autograd.grad(logprobs.sum(), inputs[:2])]


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
