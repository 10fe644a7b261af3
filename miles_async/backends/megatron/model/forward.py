"""Run packed micro-batches through megatron's pipeline schedule, to score them or to compute gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import Module

from miles_async.algorithms.objective import LossSums
from miles_async.backends.megatron.model.output import ModelOutput, output_of
from miles_async.backends.megatron.packing.pack import PackedBatch
from miles_async.backends.megatron.packing.routing_replay import Routers
from miles_async.backends.megatron.packing.shared_prefixes import rotary_positions

LossFunction = Callable[[PackedBatch, ModelOutput], LossSums]
"""(micro-batch, output of the model) → sums over the micro-batch."""

Scoring = Callable[[PackedBatch, ModelOutput], Tensor]
"""(micro-batch, output of the model) → a number for each of its tokens, [N]."""

OfOutput = Callable[[PackedBatch, ModelOutput], Any]
"""Either of them; called on the last pipeline stage."""

Recorded = dict[int, Tensor]
"""Experts that routers chose for a micro-batch, by layer."""

MicroBatch = tuple[PackedBatch, OfOutput, Recorded | None]
"""On its way through this rank's pipeline stages; ``Recorded``: to fill in."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """This rank's part of a model: one module, or one per virtual pipeline stage."""

    modules: Sequence[Module]
    filler: PackedBatch  # an empty micro-batch, with experts if they are replayed
    routers: Mapping[Module, Routers] = field(default_factory=dict)
    inside: Callable[[], AbstractContextManager[None]] = nullcontext  # entered to score
    before_training: Callable[[], None] = lambda: None  # before gradients of an optimizer step; collective

    def score(
        self, packs: Sequence[PackedBatch], scoring: Scoring, *, record: bool = False
    ) -> tuple[list[Tensor], list[Recorded]]:
        """Return each micro-batch's float32 [N], on the last pipeline stage, and if ``record`` the experts that this
        rank's routers chose for it. Collective.
        """
        recorded: list[Recorded] = [{} for _ in packs] if record else []
        with torch.no_grad(), _evaluating(self.modules), self.inside():
            numbers = self._run(packs, scoring, recorded, forward_only=True)
        return numbers, recorded

    def accumulate_gradients(self, packs: Sequence[PackedBatch], loss: LossFunction) -> list[Mapping[str, Tensor]]:
        """Run forward and backward of one optimizer step. Gradients are reduced over ranks, and divided by the total
        count of the losses over all micro-batches and ranks.

        Returns metric sums per micro-batch on the last pipeline stage, nothing on the others. Collective.
        """

        def of_output(packed: PackedBatch, output: ModelOutput) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            sums = loss(packed, output)
            # Context-parallel ranks have the same loss, each with gradients of its positions: count it once.
            count = sums.count if parallel_state.get_context_parallel_rank() == 0 else torch.zeros_like(sums.count)
            return sums.loss, count.int(), sums.metrics

        self.before_training()
        return self._run(packs, of_output, [], forward_only=False)

    def _run(
        self, packs: Sequence[PackedBatch], of_output: OfOutput, recorded: Sequence[Recorded], *, forward_only: bool
    ) -> list[Any]:
        """Results of ``of_output``, one per micro-batch, on the last stage. ``recorded``: to fill in, or empty."""
        micro_batches: list[MicroBatch] = [(packed, of_output, into) for packed, into in zip_longest(packs, recorded)]
        if len(self.modules) > 1:  # the interleaved schedule needs a multiple of the stages
            missing = -len(packs) % parallel_state.get_pipeline_model_parallel_world_size()
            # With gradients, either all micro-batches replay experts or none.
            filler = self.filler if packs[0].experts else dataclasses.replace(self.filler, experts=None)
            # Fillers come first: the last micro-batch's gradients start reductions (--overlap-grad-reduce), and a
            # filler gives the output layer none.
            micro_batches = [(filler, _no_loss, None)] * missing + micro_batches
        iterators = [iter(micro_batches) for _ in self.modules]
        try:
            results = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self.modules),
                num_microbatches=len(micro_batches),
                seq_length=max(packed.tokens.shape[1] for packed, *_ in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            for routers in self.routers.values():
                routers.forget()
        return list(results[-len(packs) :])

    def _forward_step(self, micro_batches: Iterator[MicroBatch], module: Module) -> tuple[Tensor, Callable[..., Any]]:
        packed, of_output, recorded = next(micro_batches)
        routers = self.routers.get(module)
        choosing = routers.choosing(packed.experts, recorded, packed.tokens.device) if routers else nullcontext()
        arguments = {"position_ids": packed.position_ids}
        if packed.images is not None:
            arguments |= packed.images.arguments(packed.tokens.device)
        with choosing, rotary_positions(module, packed.attention, packed.position_ids[0]):
            output = module(
                input_ids=packed.tokens, attention_mask=None, packed_seq_params=packed.attention, **arguments
            )
        # With forward_only, the schedule passes non_loss_data=True and stores the result.
        return output, lambda hidden, **_: of_output(packed, output_of(module, hidden))


def _no_loss(packed: PackedBatch, output: ModelOutput) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """A filler's loss: 0, with zero gradients for earlier stages."""
    nothing = torch.zeros((), dtype=torch.int, device=output.hidden.device)
    return output.hidden[:0].sum(), nothing, {}


@contextlib.contextmanager
def _evaluating(modules: Sequence[Module]) -> Iterator[None]:
    were_training = [module.training for module in modules]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in zip(modules, were_training, strict=True):
            module.train(training)
