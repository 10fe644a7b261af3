"""Megatron's flags that choose how to train. Flags named after a field of its configs are not listed: any such
``--X`` is taken as ``--megatron-X`` (``arguments/megatron_fields.py``).
"""

from __future__ import annotations

from functools import partial

from miles_async.arguments.foreign.record import ForeignFlag, renamed, rows

_LOSS = "the policy gradient alone moves the weights"
FLAGS_WIN = "a resumed run (--load) computes the schedule from its own flags and continues at the checkpoint's step"
SAME_FLAGS = f"{FLAGS_WIN}: remove it, and give --lr, --min-lr, --lr-decay-style and the warm-up of the earlier run"

_noted = partial(rows, "noted", origin="Megatron-LM")
_refused = partial(rows, "refused", origin="Megatron-LM")


def _turns_off(flag: str, field: str) -> ForeignFlag:
    """A switch with another name than the field of Megatron's config that it turns off."""
    ours = f"--megatron-{field.replace('_', '-')}"
    return renamed(flag, ours, "false", origin="Megatron-LM", takes="nothing")


MEGATRON: tuple[ForeignFlag, ...] = (
    # The model's layers, beyond what config.json says.
    *_noted("layers come from Megatron-Bridge, by the model_type of config.json", many="spec",
            switches="enable-experimental"),
    *_noted("layers are Transformer Engine's where it is installed, otherwise Megatron's", one="transformer-impl",
            only=("transformer_engine", "local")),
    *_noted("--attention-backend names the kernels of attention", switches="use-flash-attn"),
    *_noted("every parameter is loaded from --hf-checkpoint", one="init-method-std"),
    *_noted("config.json says the size of the vocabulary", one="make-vocab-size-divisible-by"),
    *_noted("engines have no dropout, and the trainer's log-probs are to be theirs",
            one="attention-dropout hidden-dropout", only=("0",)),
    *_noted("config.json says which positions there are", one="max-position-embeddings",
            switches="no-position-embedding"),
    *_noted("samples are packed: --max-tokens-per-gpu is the size of a micro-batch", one="seq-length micro-batch-size"),
    # Mixtures of experts.
    *_noted("engines route in fp32, and rounding would choose others", one="moe-router-dtype", only=("fp32",)),
    *_noted(f"no balancing loss is added: {_LOSS}", one="moe-router-load-balancing-type"),
    *_noted(_LOSS, one="moe-aux-loss-coeff moe-z-loss-coeff moe-router-bias-update-rate", only=("0",)),
    *_noted("micro-batches differ in length, and alltoall is the dispatcher that was tested with them",
            one="moe-token-dispatcher-type", only=("alltoall", "flex")),
    *_noted("tokens reach experts by alltoall; DeepEP, which may be faster, was never run here",
            switches="moe-enable-deepep"),
    # Memory and speed.
    *_noted("it always is: optimizer state is sharded over data-parallel ranks", switches="use-distributed-optimizer"),
    *_noted("gradients always are accumulated and reduced in fp32", switches="accumulate-allreduce-grads-in-fp32"),
    *_refused("gradients always are accumulated and reduced in fp32: remove it", switches="grad-reduce-in-bf16"),
    *_noted("AdamW is the optimizer", one="optimizer", only=("adam",)),
    _turns_off("--no-rope-fusion", "apply_rope_fusion"),
    _turns_off("--no-bias-swiglu-fusion", "bias_activation_fusion"),
    _turns_off("--no-bias-gelu-fusion", "bias_activation_fusion"),
    # 8 and 4 bits.
    *_refused("training in 8 or 4 bits is not implemented (log-probs and exported weights were never compared): use "
            "--bf16", one="fp8-format fp8-recipe fp4-format fp4-recipe te-precision-config-file",
            switches="fp8-param-gather fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag "
            "moe-router-padding-for-quantization"),
    *_refused("use --bf16: what fp16 needs, a scaled loss, is not implemented", switches="fp16"),
    # Learning rate.
    *_noted("a warm-up begins at 0", one="lr-warmup-init", only=("0",)),
    *_refused("the decay ends with the run: remove it", one="lr-decay-iters lr-decay-samples"),
    *_refused("use --lr-decay-style", one="lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style"),
    *_noted(FLAGS_WIN, switches="override-opt_param-scheduler override-opt-param-scheduler"),
    *_refused(SAME_FLAGS, switches="use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler"),
    # Checkpoints.
    *_refused("use --load with the checkpoint's own directory, such as DIR/iter_0000040", one="ckpt-step"),
    *_noted("--async-save writes checkpoints while training continues", switches="use-persistent-ckpt-worker"),
    # Batches.
    *_noted("it is the default; --loss-aggregation has the alternatives", switches="calculate-per-token-loss"),
    *_refused("use --num-rollout (rollout steps)", one="train-iters"),
    *_refused("use --ref-hf-checkpoint, a Hugging Face directory", one="ref-load"),
)  # fmt: skip
