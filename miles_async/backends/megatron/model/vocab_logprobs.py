"""Log-probs and entropy of tokens from hidden states, without logits of all of them at one time.

Logits are made for a few rows at a time and dropped again; the backward pass makes them a second time. Beyond hidden
states and gradients, both passes take the memory of ``chunk`` rows of fp32 logits, however many tokens there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabSettings:
    """Settings of :func:`vocab_logprobs`."""

    temperature: float
    chunk: int  # rows of fp32 logits that may exist at one time
    softcap: float | None = None  # logits are softcap · tanh(product / softcap) before the temperature
    entropy: bool = False
    group: dist.ProcessGroup | None = None  # tensor-parallel ranks; each has an equal part of the vocabulary
    zero_gradient: bool = False  # give autograd a gradient of zeros where the weight has a buffer for the real one


def vocab_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: VocabSettings
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of ``labels``, and entropies or None: each fp32 [n] and differentiable.

    ``hidden``: [n, H], in ``weight``'s dtype. ``weight``: this rank's rows of the output layer, [V / TP, H].
    ``labels``: int64 [n], in [0, V). With tensor parallelism the gradient of ``hidden`` is this rank's part of a sum
    over ranks. The gradient of ``weight`` is added to ``weight.main_grad`` where DistributedDataParallel made one.
    """
    logprobs, entropy = _VocabLogprobs.apply(hidden, weight, labels, settings)
    return logprobs, entropy if settings.entropy else None


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, settings: VocabSettings
    ) -> tuple[Tensor, Tensor]:
        dtype = _dtype(weight)
        logprobs, normalizers, entropies = hidden.new_zeros(3, len(labels), dtype=dtype)
        for rows in _chunks(len(labels), weight, settings.chunk, entropy=settings.entropy):
            logits, _ = _logits(hidden[rows], weight, settings)
            largest = _reduced(logits.amax(-1), dist.ReduceOp.MAX, settings.group)
            logits -= largest[:, None]
            column, inside = _columns(labels[rows], weight, settings.group)
            sums = [logits.gather(1, column[:, None])[:, 0] * inside]
            weights = logits.exp() if settings.entropy else logits.exp_()
            sums.append(weights.sum(-1))
            if settings.entropy:
                sums.append(weights.mul_(logits).sum(-1))
            label, total, *weighted = _reduced(torch.stack(sums), dist.ReduceOp.SUM, settings.group)
            logprobs[rows] = label - total.log()
            normalizers[rows] = largest + total.log()
            if settings.entropy:
                entropies[rows] = total.log() - weighted[0] / total  # H = log Z − Σ p·z
            del logits, weights  # before the next ones are made
        ctx.save_for_backward(hidden, weight, labels, normalizers, entropies)
        ctx.settings, ctx.main_grad = settings, getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, labels, normalizers, entropies = ctx.saved_tensors
        settings: VocabSettings = ctx.settings
        of_logprobs, of_entropies = (
            torch.zeros_like(normalizers) if gradient is None else gradient / settings.temperature
            for gradient in gradients
        )
        with_entropy = gradients[1] is not None
        of_hidden = torch.empty_like(hidden)
        of_weight = ctx.main_grad
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=_dtype(weight))
        softcapped = settings.softcap is not None
        for rows in _chunks(len(labels), weight, settings.chunk, entropy=with_entropy, softcapped=softcapped):
            logits, slope = _logits(hidden[rows], weight, settings, with_slope=True)
            # dL/dlogits = dL/dlogprob · (one at the label − probabilities)
            #              − dL/dentropy · probabilities · (log-probabilities + entropy)
            logits.sub_(normalizers[rows, None])
            if with_entropy:
                probabilities = logits.exp()
                logits.add_(entropies[rows, None]).mul_(-of_entropies[rows, None]).sub_(of_logprobs[rows, None])
                logits.mul_(probabilities)
                del probabilities
            else:
                logits.exp_().mul_(-of_logprobs[rows, None])
            column, inside = _columns(labels[rows], weight, settings.group)
            logits.scatter_add_(1, column[:, None], (of_logprobs[rows] * inside)[:, None])
            if slope is not None:
                logits.mul_(slope)
            logits = logits.to(weight.dtype)
            torch.mm(logits, weight, out=of_hidden[rows])
            if ctx.needs_input_grad[1]:
                _add_product(of_weight, logits, hidden[rows])
            del logits, slope
        if ctx.main_grad is not None:
            return of_hidden, torch.zeros_like(weight) if settings.zero_gradient else None, None, None
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None


def _dtype(weight: Tensor) -> torch.dtype:
    """Dtype of logits, their sums, and sums of gradients: fp32 at least."""
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(
    count: int, weight: Tensor, chunk: int, *, entropy: bool = False, softcapped: bool = False
) -> Iterator[slice]:
    """Slices of rows, so few that ``chunk`` rows of fp32 logits are not exceeded by all that lives beside them: the
    model's own dtype of logits or their gradient, half as large, or for the entropy their exponentials, or for the
    gradient of softcapped logits their slopes.
    """
    copies = 2.0 if entropy else 1.0 if weight.dtype == _dtype(weight) else 1.5
    size = max(1, int(chunk / (copies + softcapped)))
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _logits(
    hidden: Tensor, weight: Tensor, settings: VocabSettings, *, with_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return logits, and if asked for their derivative by the product, times the temperature; None where that is 1."""
    logits, slope = (hidden @ weight.t()).to(_dtype(weight)), None
    if settings.softcap is not None:
        logits.div_(settings.softcap).tanh_()
        if with_slope:
            slope = logits.square().neg_().add_(1.0)
        logits.mul_(settings.softcap)
    return logits.div_(settings.temperature), slope


def _columns(labels: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Columns of this rank's logits that belong to ``labels``, and which of the labels this rank has (bool)."""
    width = weight.shape[0]
    column = labels - (group.rank() * width if group is not None else 0)
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _reduced(values: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``total += gradientᵀ · hidden``, [V / TP, H]."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    # No kernel of torch adds a product to another dtype: through parts of it, not larger than the gradient.
    size = max(1, gradient.numel() // hidden.shape[1])
    for first in range(0, total.shape[0], size):
        total[first : first + size] += gradient[:, first : first + size].t() @ hidden
