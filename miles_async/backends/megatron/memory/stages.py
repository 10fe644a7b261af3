"""Records of memory measurements: the request for a model's pipeline stages, and the result for one stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.model import ModelArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRequest:
    """The ranks whose memory is to be measured."""

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
    parameters: int  # without experts and adapters
    expert_parameters: int
    adapters: int = 0  # with --lora-rank: the trained parameters, in addition to the others
    expert_adapters: int = 0
    ahead: int = 0  # of parameters: trained layers for multi-token prediction, which reference and critic lack
    expert_ahead: int = 0
    output_layer: int = 0  # of parameters: replaced by a value head in a critic
    value_head: int = 0
    tower: int = 0  # of parameters: the vision tower, whole on every tensor-parallel rank
    kept: int  # bytes kept from a micro-batch's forward pass for its backward pass
    peak: int  # largest bytes in both passes, kept ones included, without parameters and gradients
    received: int = 0  # bytes of keys and values of one layer that come from other context-parallel ranks
    under_way: int  # micro-batches whose activations are kept at once; each virtual stage counts

    @property
    def activations(self) -> int:
        """Bytes of all micro-batches under way.

        Transformer Engine (2.11) frees received keys and values after a layer's attention (``AttnFuncWithCPAndKVP2P``).
        """
        return self.peak + self.received + (self.under_way - 1) * self.kept
