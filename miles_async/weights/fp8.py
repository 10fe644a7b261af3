"""Weights as engines with ``--rollout-quantization fp8`` hold them.

Matrices of attention, MLP and experts are float8 (e4m3), each block of 128 × 128 elements with an fp32 scale of its
own: the form in which DeepSeek-V3 was published, and that SGLang's kernels read. Embedding, output layer, norms,
biases and routers stay as they were trained, and so does what latent attention absorbs (kv_b_proj), which SGLang
(0.5.23) would make bf16 again, or round once more. It quantizes activations, in groups of 128, while it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from miles_async.arguments.model import num_experts
from miles_async.arguments.weights import Quantization
from miles_async.train_data.work import model_work
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of e4m3
SCALE_BYTES = 4

CONFIG: JsonObject = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["kv_b_proj"],
}
"""``quantization_config`` of config.json for such weights."""

_MATRICES = frozenset(
    "q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa gate_proj up_proj down_proj w1 w2 w3".split()
)


def is_quantized(name: str) -> bool:
    """True for the names (of Hugging Face) of tensors that engines hold in float8."""
    *_, layer, kind = ["", *name.split(".")]
    return kind == "weight" and layer in _MATRICES


def quantized(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as engines hold it; a quantized one is followed by its scales, ``….weight_scale_inv``."""
    for name, tensor in tensors:
        if is_quantized(name):
            values, scales = quantize(tensor)
            yield name, values
            yield f"{name}_scale_inv", scales
        else:
            yield name, tensor


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float8 [M, N] and fp32 [⌈M / 128⌉, ⌈N / 128⌉] of a matrix [M, N], which is about value × scale of its block.

    The largest element of a block becomes ±448. A block of zeros, or of elements below 1e-42, has scale 1.
    """
    import torch
    import torch.nn.functional as F

    rows, columns = matrix.shape
    padded = F.pad(matrix.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [row blocks, 128, column blocks, 128]
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)  # of zeros, or of what is below the smallest fp32
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def published_bytes(config: JsonObject, elements: int, *, item: int, quantization: Quantization) -> int:
    """Bytes of ``elements`` weights of a model with ``config`` (config.json), which is trained in ``item`` bytes each.

    Norms, biases and routers count as if they were quantized, too.
    """
    work = model_work(config)
    if quantization == "none" or work is None:
        return elements * item
    plain = work.embedding_weights * (1 if config.get("tie_word_embeddings") else 2)
    return plain * item + round((elements - plain) * (1 + SCALE_BYTES / BLOCK**2))


def shape_problems(
    config: JsonObject, *, attention: int, dense: int, experts: int, shared_experts: int
) -> Iterator[str]:
    """Yield the fields of ``config`` (config.json) whose matrices do not split into whole blocks.

    ``attention``, ``dense`` (MLPs), ``experts``, ``shared_experts``: ranks of an engine over which one of these is
    split. SGLang (0.5.23) joins queries, keys and values to one matrix, gates and up-projections to another, and
    quantizes what goes into a matrix in whole groups.
    """
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    keys = config.get("num_key_value_heads") or heads
    parts = {"hidden_size": config["hidden_size"]}
    if "kv_lora_rank" in config:
        parts["num_attention_heads × v_head_dim"] = heads * config["v_head_dim"] // attention
        if attention > 1:  # a whole matrix may end within a block
            queries = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
            parts["num_attention_heads × (qk_nope_head_dim + qk_rope_head_dim)"] = heads * queries // attention
        parts["q_lora_rank"] = config.get("q_lora_rank") or 0
    else:
        parts |= {
            "num_attention_heads × head_dim": heads * width // attention,
            "num_key_value_heads × head_dim": max(1, keys // attention) * width,
        }
    if num_experts(config):
        name = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
        parts[name] = config[name] // experts
        if shared := config.get("n_shared_experts"):
            parts["n_shared_experts × moe_intermediate_size"] = (
                shared * config["moe_intermediate_size"] // shared_experts
            )
    if not num_experts(config) or config.get("first_k_dense_replace"):
        parts["intermediate_size"] = config["intermediate_size"] // dense
    for field, part in parts.items():
        if part % BLOCK:
            yield (
                f"{field} of config.json leaves {part} on each of an engine's GPUs, expected a multiple of {BLOCK}; "
                "give engines fewer GPUs (--rollout-num-gpus-per-engine), split less of them (experts with "
                "--sglang-ep-size, shared ones with --sglang-moe-a2a-backend deepep, attention with "
                "--sglang-attn-dp-size), or leave it out"
            )
