"""Converts a GGUF file of a Llama to a Hugging Face directory: config, weights in fp32, tokenizer with chat template.

llama.cpp stores the rows of queries and keys in another order than transformers. Its rotary embedding turns
neighbouring rows of a head (0 and 1, 2 and 3, ...), that of transformers turns row i with row i + head size / 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a GGUF file."""

    path: Path
    reader: GGUFReader

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Raises ValueError if it is no Llama with a byte-level BPE."""
        file = cls(path, GGUFReader(path))
        for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
            if (found := file.get(key)) != expected:
                raise ValueError(f"{path}: expected {key} {expected!r}, found {found!r}")
        return file

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata field, whose type depends on the key."""
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()


def convert(path: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files to ``directory``.

    config.json comes last: a directory that has one is whole. Raises ValueError for what is no Llama.
    """
    file = GgufFile.open(path)
    config = llama_config(file)
    weights = state_dict(file, config)
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer(file).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it, whatever the umask
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    config.save_pretrained(directory)


def llama_config(file: GgufFile) -> LlamaConfig:
    """Config of the model, with fp32 weights."""
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=file.get("llama.embedding_length"),
        intermediate_size=file.get("llama.feed_forward_length"),
        num_hidden_layers=file.get("llama.block_count"),
        num_attention_heads=file.get("llama.attention.head_count"),
        num_key_value_heads=file.get("llama.attention.head_count_kv"),
        max_position_embeddings=file.get("llama.context_length"),
        rope_theta=file.get("llama.rope.freq_base", 10_000.0),
        # Stored in fp32, where 1e-5 is 9.99999974e-06.
        rms_norm_eps=float(np.format_float_positional(np.float32(file.get("llama.attention.layer_norm_rms_epsilon")))),
        vocab_size=len(file.get("tokenizer.ggml.tokens")),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in file.reader.tensors),
        dtype="float32",
        **{f"{name}_id": token for name, token in ids.items()},
    )


def state_dict(file: GgufFile, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Tensors under transformers' names, dequantized to fp32."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in file.reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part, name = hf_name(tensor.name)
        if part in heads:
            values = halves_apart(values, heads[part])
        weights[name] = np.ascontiguousarray(values)
    return weights


def hf_name(name: str) -> tuple[str, str]:
    """llama.cpp's word for the part of the model, and transformers' name of the tensor. Raises ValueError.

    >>> hf_name("blk.3.attn_q.weight")
    ('attn_q', 'model.layers.3.self_attn.q_proj.weight')
    """
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_PARTS:
            return part, f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"
        case [part, "weight"] if part in OTHER_PARTS:
            return part, f"{OTHER_PARTS[part]}.weight"
    raise ValueError(f"expected the tensors of a Llama without biases, found {name}")


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head, [heads · d, H], from (0, d/2, 1, d/2 + 1, ...) to (0, 1, 2, ...)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The model's byte-level BPE, in which every digit is a token, with the chat template of the file."""
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL])
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **{name: tokens[token] for name, token in ids.items() if token is not None},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=file.get("llama.context_length"),
        chat_template=file.get("tokenizer.chat_template"),
    )
