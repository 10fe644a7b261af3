"""Megatron's flags that choose how to train. Those that are named as a field of its configs are not here: any such
``--X`` is taken as ``--megatron-X`` (``arguments/megatron_fields.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from miles_async.arguments.foreign.record import ForeignFlag

_NO_FP8 = "training in 8 or 4 bits is not implemented (log-probs and exported weights were never compared): use --bf16"
_LOG_PROBS = "engines have no dropout, and the trainer's log-probs are to be theirs"
_LOSS = "the policy gradient alone moves the weights"


_flag = partial(ForeignFlag, origin="Megatron-LM")
_switch = partial(_flag, takes="nothing")


def _sets(flag: str, field: str, value: Literal["true", "false"]) -> ForeignFlag:
    """A switch that has another name than the field of Megatron's config that it sets."""
    ours = f"--megatron-{field.replace('_', '-')}"
    return _flag(flag, "works", f"is `{ours} {value}`", takes="nothing", ours=(ours, value))


MEGATRON: tuple[ForeignFlag, ...] = (
    # The model's layers, beyond what config.json says.
    _flag("--spec", "noted", "layers come from Megatron-Bridge, by the model_type of config.json", takes="many"),
    _switch("--use-rotary-position-embeddings", "noted", "every model here has rotary positions"),
    _flag("--transformer-impl", "noted", "its layers are used where it is installed", only=("transformer_engine",)),
    _flag("--attention-dropout", "noted", _LOG_PROBS, only=("0",)),
    _flag("--hidden-dropout", "noted", _LOG_PROBS, only=("0",)),
    _flag("--max-position-embeddings", "noted", "positions are rotary, and config.json says how many there are"),
    _flag("--seq-length", "noted", "samples are packed: --max-tokens-per-gpu is the size of a micro-batch"),
    # Mixtures of experts.
    _flag("--moe-router-dtype", "noted", "engines route in fp32, and rounding would choose others", only=("fp32",)),
    _flag("--moe-router-load-balancing-type", "noted", f"no balancing loss is added: {_LOSS}"),
    _flag("--moe-aux-loss-coeff", "noted", _LOSS, only=("0",)),
    _flag("--moe-z-loss-coeff", "noted", _LOSS, only=("0",)),
    _flag("--moe-router-bias-update-rate", "noted", _LOSS, only=("0",)),
    _flag(
        "--moe-token-dispatcher-type",
        "noted",
        "micro-batches differ in length, and alltoall is the dispatcher that was tested with them",
        only=("alltoall",),
    ),
    _switch("--moe-enable-deepep", "refused", "tokens reach experts by alltoall, DeepEP was never run here: remove it"),
    # Memory and speed.
    _switch(
        "--use-distributed-optimizer", "noted", "it always is: optimizer state is sharded over data-parallel ranks"
    ),
    _switch("--accumulate-allreduce-grads-in-fp32", "noted", "gradients always are accumulated and reduced in fp32"),
    _flag("--optimizer", "noted", "AdamW is the optimizer", only=("adam",)),
    _sets("--no-rope-fusion", "apply_rope_fusion", "false"),
    _sets("--no-bias-swiglu-fusion", "bias_activation_fusion", "false"),
    _sets("--no-bias-gelu-fusion", "bias_activation_fusion", "false"),
    # 8 and 4 bits.
    _flag("--fp8-format", "refused", _NO_FP8),
    _flag("--fp8-recipe", "refused", _NO_FP8),
    _switch("--fp8-param-gather", "refused", _NO_FP8),
    _flag("--fp4-format", "refused", _NO_FP8),
    _flag("--fp4-recipe", "refused", _NO_FP8),
    _switch("--fp4-param-gather", "refused", _NO_FP8),
    _flag("--te-precision-config-file", "refused", _NO_FP8),
    _switch("--reuse-grad-buf-for-mxfp8-param-ag", "refused", _NO_FP8),
    _switch("--moe-router-padding-for-quantization", "refused", _NO_FP8),
    _switch("--fp16", "refused", "use --bf16: what fp16 needs, a scaled loss, is not implemented"),
    # Batches.
    _switch("--calculate-per-token-loss", "noted", "it is the default; --loss-aggregation has the alternatives"),
    _flag("--micro-batch-size", "noted", "samples are packed: --max-tokens-per-gpu is the size of a micro-batch"),
    _flag("--train-iters", "refused", "use --num-rollout (rollout steps)"),
    _flag("--ref-load", "refused", "use --ref-hf-checkpoint, a Hugging Face directory"),
)
