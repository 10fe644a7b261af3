"""Log-probs, entropy and values of packed tokens from the model's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from miles_async.backends.megatron.model.output import ModelOutput
from miles_async.backends.megatron.model.vocab_logprobs import VocabSettings, vocab_logprobs
from miles_async.backends.megatron.packing.pack import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores the tokens of a micro-batch that need log-probs."""

    temperature: float
    chunk: int  # tokens whose logits exist at one time

    def __call__(
        self, packed: PackedBatch, output: ModelOutput, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, if asked for, entropies of the distributions that the tokens are drawn from: fp32 [N],
        differentiable. Entry ``i`` is for ``tokens[i]`` given its prefix, 0 where no log-prob is needed.

        On the last pipeline stage. Collective over tensor- and context-parallel ranks. Every context-parallel rank gets
        all values; gradients go to the rank that computed the value.
        """
        settings = self._settings(output, entropy=entropy)
        hidden = output.hidden[packed.rows]
        logprobs, entropies = vocab_logprobs(hidden, output.weight, packed.labels, settings, packed.row_of)
        return _scatter(logprobs, packed), None if entropies is None else _scatter(entropies, packed)

    def logprobs(self, packed: PackedBatch, output: ModelOutput) -> Tensor:
        """The log-probs alone."""
        return self(packed, output)[0]

    def entropies(self, packed: PackedBatch, output: ModelOutput) -> Tensor:
        """The entropies alone."""
        entropies = self(packed, output, entropy=True)[1]
        assert entropies is not None, "they were asked for"
        return entropies

    def ahead(self, packed: PackedBatch, output: ModelOutput) -> Tensor:
        """Log-probs of the same tokens by each layer for multi-token prediction, fp32 [layers, N]: layer ``k``, from 1,
        predicted them k tokens earlier than the policy; 0 where there was no such token. The output layer gets no
        gradient.
        """
        settings = self._settings(output)
        row = packed.rows[packed.row_of]
        position, found = packed.position_ids[0, row], []
        for k, hidden in enumerate(output.ahead, start=1):
            rows = (row - k).clamp(min=0)
            logprobs, _ = vocab_logprobs(hidden[rows], output.weight.detach(), packed.labels, settings)
            found.append(_scatter(logprobs * (position >= k), packed))  # before that, the row is another sample's
        return torch.stack(found)

    def _settings(self, output: ModelOutput, *, entropy: bool = False) -> VocabSettings:
        return VocabSettings(
            temperature=self.temperature,
            chunk=self.chunk,
            softcap=output.softcap,
            entropy=entropy,
            group=parallel_state.get_tensor_model_parallel_group(),
            zero_gradient=output.awaits_gradient,
        )


def values_of(packed: PackedBatch, output: ModelOutput) -> Tensor:
    """A critic's values, fp32 [N]: entry ``i`` is for the prefix of ``tokens[i]``, 0 where no log-prob is needed.

    On the last pipeline stage. Collective over context-parallel ranks, as :class:`Scorer` is.
    """
    values = output.hidden[packed.rows].float() @ output.weight[0].float()
    return _scatter(values[packed.row_of], packed)


def _scatter(values: Tensor, packed: PackedBatch) -> Tensor:
    """Scatter values of the scored tokens, [n], to all tokens, [N], and add context-parallel ranks' values."""
    own = values.new_zeros(packed.num_tokens).index_put((packed.scored,), values)
    # Sums over the group; gradients pass unchanged.
    return reduce_from_tensor_model_parallel_region(own, group=parallel_state.get_context_parallel_group())
