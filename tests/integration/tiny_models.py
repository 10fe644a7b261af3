"""Tiny random Hugging Face models, large enough to tell right from wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64


def save_tiny_qwen3(directory: Path, *, tied: bool, seed: int = 0, **config: Any) -> Path:
    """Qwen3 with hidden 64 and 2 layers, its norms and weights shaken so that no two of them are alike."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(settings | config)))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.data.mul_(3)
    model.save_pretrained(directory)
    return directory
