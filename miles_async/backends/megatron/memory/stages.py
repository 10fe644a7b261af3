"""Records of memory measurements: the request for a model's pipeline stages, and the result for one stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.model import ModelArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRequest:
    """The ranks whose memory is asked for."""

    directory: Path  # with config.json; weights are not read
    model: ModelArguments
    world_size: int
    tokens: int  # of one micro-batch
    logprob_chunk: int  # tokens whose logits exist at one time
    temperature: float
    entropy: bool  # the loss asks for it


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One rank of a pipeline stage: elements of parameters, bytes of activations.

    With virtual pipeline stages, the parameters of all that a rank has, and the activations of the largest.
    """

    stages: range  # pipeline stages that are alike
    parameters: int  # but for the experts' and those of adapters
    expert_parameters: int
    adapters: int = 0  # with --lora-rank: parameters that are trained, beside the others, which are not
    expert_adapters: int = 0
    ahead: int = 0  # of parameters: those of trained layers for multi-token prediction, which no other model has
    expert_ahead: int = 0
    output_layer: int = 0  # of parameters: those that a critic has a value head instead of
    value_head: int = 0
    kept: int  # bytes from a micro-batch's forward pass that its backward pass needs
    peak: int  # bytes at most at one time in both passes, kept ones included; no parameters, no gradients
    received: int = 0  # bytes of keys and values of one layer that come from other context-parallel ranks
    under_way: int  # micro-batches whose activations are kept at one time; of virtual stages, each counts

    @property
    def activations(self) -> int:
        """Bytes of all micro-batches that are under way at once.

        Transformer Engine (2.11) lets go of what it received when a layer's attention is computed
        (``AttnFuncWithCPAndKVP2P``).
        """
        return self.peak + self.received + (self.under_way - 1) * self.kept
