"""Log-probs and entropy of tokens from hidden states, without holding all logits at once.

Logits are computed for a few rows at a time, and again in the backward pass. Beyond hidden states and gradients, both
passes take the memory of ``chunk`` rows of fp32 logits, however many tokens there are.
"""

from __future__ import annotations

import math
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
    zero_gradient: bool = False  # give autograd zeros where the weight has a buffer for its gradient


def vocab_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: VocabSettings, row_of: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of ``labels``, and entropies or None: each fp32 [n] and differentiable.

    ``hidden``: [m, H], in ``weight``'s dtype. ``weight``: this rank's rows of the output layer, [V / TP, H].
    ``labels``: int64 [n], in [0, V). ``row_of``: int64 [n], in [0, m), the row of ``hidden`` that predicts each label;
    labels of one row share its logits. By default row ``i`` predicts label ``i``.

    With tensor parallelism the gradient of ``hidden`` is this rank's part of a sum over ranks. The gradient of
    ``weight`` is added to ``weight.main_grad`` where DistributedDataParallel made one.
    """
    if row_of is None:
        row_of = torch.arange(len(labels), device=labels.device)
    logprobs, entropy = _VocabLogprobs.apply(hidden, weight, labels, row_of, settings)
    return logprobs, entropy[row_of] if settings.entropy else None


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, row_of: Tensor, settings: VocabSettings
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probs of labels, [n], and entropies of rows, [m]."""
        dtype = _dtype(weight)
        of_labels = hidden.new_zeros(len(labels), dtype=dtype)
        largests, log_totals, entropies = hidden.new_zeros(3, len(hidden), dtype=dtype)
        for rows in _chunks(len(hidden), weight, settings.chunk, entropy=settings.entropy):
            logits, _ = _logits(hidden[rows], weight, settings)
            largest = _reduced(logits.amax(-1), dist.ReduceOp.MAX, settings.group)
            logits -= largest[:, None]
            row, column, inside = _places(rows, row_of, labels, weight, settings.group)
            of_labels += logits[row, column] * inside
            weights = logits.exp() if settings.entropy else logits.exp_()
            sums = [weights.sum(-1)]
            if settings.entropy:
                sums.append(weights.mul_(logits).sum(-1))
            total, *weighted = _reduced(torch.stack(sums), dist.ReduceOp.SUM, settings.group)
            largests[rows], log_totals[rows] = largest, total.log()
            if settings.entropy:
                entropies[rows] = log_totals[rows] - weighted[0] / total  # H = log Z − Σ p·z
            del logits, weights  # before the next ones are made
        logprobs = _reduced(of_labels, dist.ReduceOp.SUM, settings.group) - log_totals[row_of]
        ctx.save_for_backward(hidden, weight, labels, row_of, largests + log_totals, entropies)
        ctx.settings, ctx.main_grad = settings, getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, labels, row_of, normalizers, entropies = ctx.saved_tensors
        settings: VocabSettings = ctx.settings
        of_logprobs, of_entropies = (
            normalizers.new_zeros(count) if gradient is None else gradient / settings.temperature
            for gradient, count in zip(gradients, (len(labels), len(hidden)), strict=True)
        )
        of_rows = torch.zeros_like(normalizers).index_add_(0, row_of, of_logprobs)
        with_entropy = gradients[1] is not None
        of_hidden = torch.empty_like(hidden)
        of_weight = ctx.main_grad
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=_dtype(weight))
        softcapped = settings.softcap is not None
        for rows in _chunks(len(hidden), weight, settings.chunk, entropy=with_entropy, softcapped=softcapped):
            logits, slope = _logits(hidden[rows], weight, settings, with_slope=True)
            # dL/dlogits = sum over the row's labels of dL/dlogprob · (one at the label − probabilities)
            #              − dL/dentropy · probabilities · (log-probabilities + entropy)
            logits.sub_(normalizers[rows, None])
            if with_entropy:
                probabilities = logits.exp()
                logits.add_(entropies[rows, None]).mul_(-of_entropies[rows, None]).sub_(of_rows[rows, None])
                logits.mul_(probabilities)
                del probabilities
            else:
                logits.exp_().mul_(-of_rows[rows, None])
            row, column, inside = _places(rows, row_of, labels, weight, settings.group)
            logits.index_put_((row, column), of_logprobs * inside, accumulate=True)
            if slope is not None:
                logits.mul_(slope)
            logits = logits.to(weight.dtype)
            torch.mm(logits, weight, out=of_hidden[rows])
            if ctx.needs_input_grad[1]:
                _add_product(of_weight, logits, hidden[rows])
            del logits, slope
        if ctx.main_grad is not None:
            return of_hidden, torch.zeros_like(weight) if settings.zero_gradient else None, None, None, None
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def _dtype(weight: Tensor) -> torch.dtype:
    """Dtype of logits, their sums, and sums of gradients: fp32 at least."""
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(
    count: int, weight: Tensor, chunk: int, *, entropy: bool = False, softcapped: bool = False
) -> Iterator[slice]:
    """Slices of rows, small enough that ``chunk`` rows of fp32 logits bound the logits and what coexists with them:
    logits or their gradient in the model's dtype (half as large), their exponentials (for the entropy), or slopes of
    softcapped logits (for the gradient).
    """
    copies = 2.0 if entropy else 1.0 if weight.dtype == _dtype(weight) else 1.5
    size = max(1, int(chunk / (copies + softcapped)))
    size = math.ceil(count / math.ceil(count / size)) if count else size  # no last chunk of a few rows
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
    return (logits if settings.temperature == 1 else logits.div_(settings.temperature)), slope


def _places(
    rows: slice, row_of: Tensor, labels: Tensor, weight: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of every label in this rank's logits of ``rows``, and whether this rank has it (bool)."""
    width = weight.shape[0]
    row, column = row_of - rows.start, labels - (group.rank() * width if group is not None else 0)
    inside = (row_of >= rows.start) & (row_of < rows.stop) & (column >= 0) & (column < width)
    return row.clamp(0, rows.stop - rows.start - 1), column.clamp(0, width - 1), inside


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``total += gradientᵀ · hidden``, [V / TP, H]."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    if total.is_cuda:
        torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
        return
    # On a CPU no kernel of torch adds a product to another dtype: through parts of it, not larger than the gradient.
    size = max(1, gradient.numel() // hidden.shape[1])
    for first in range(0, total.shape[0], size):
        total[first : first + size] += gradient[:, first : first + size].t() @ hidden
