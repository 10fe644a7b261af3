"""Tiny models that SGLang serves, and what they should answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from miles_async.engines.kind import ServerSpec
from tests.integration.tiny_models import VOCAB, save_tiny

MAX_LENGTH = 512


def save_served(family: str, directory: Path, *, seed: int, dtype: str = "float32") -> Path:
    """A model of ``tiny_models.FAMILIES`` with a tokenizer of the words t0 .. t63."""
    save_tiny(family, directory, seed=seed, dtype=dtype, max_position_embeddings=MAX_LENGTH)
    save_words(directory)
    return directory


def save_words(directory: Path, special: Sequence[str] = ()) -> None:
    """A tokenizer of the words t0, t1, ... and ``special`` ones, which have the last ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(f"t{i}" for i in range(VOCAB - len(special))), *special]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.decoder = decoders.Fuse()  # SGLang looks for images in the text of the prompt's tokens
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="t2", pad_token="t0", additional_special_tokens=[*special]
    ).save_pretrained(directory)


def served_spec(model: Path, logs: Path, engine_imports: Path, **more: Any) -> ServerSpec:
    """Specify an engine on a CPU that is forked from the process with the imports. ``more``: other fields."""
    defaults = {"device": "cpu", "dtype": "float32", "start_timeout": 200}
    return ServerSpec(model_path=str(model), log_dir=str(logs), fork_server=engine_imports, **{**defaults, **more})


def reference_logprobs(model: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """float32 [T - 1], of tokens[1:], by transformers."""
    return _logprobs(model, tuple(tokens), temperature)


@cache
def _logprobs(model: Path, tokens: tuple[int, ...], temperature: float) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([tokens])).logits
    return torch.log_softmax(logits[0, :-1] / temperature, -1)[range(len(tokens) - 1), list(tokens[1:])].numpy()


def declare_plugins(directory: Path, modules: Iterable[str]) -> None:
    """Make modules with a function ``register`` plugins of each SGLang server that has ``directory`` on its path, as an
    installed distribution is that declares them as entry points.
    """
    information = directory / "plugins-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 0\n")
    entries = [f"{module.rpartition('.')[2]} = {module}:register" for module in modules]
    (information / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *entries, ""]))
