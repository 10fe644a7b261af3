"""The text that engines and the trainer score at every publication: the first prompts of the run."""

from __future__ import annotations

from pathlib import Path

from miles_async.arguments.model_files import read_config
from miles_async.prompts.source import FilePromptSource
from miles_async.weights.verify import canary_tokens


def run_canary(source: FilePromptSource, hf_checkpoint: Path, max_tokens: int) -> tuple[int, ...]:
    """At most ``max_tokens`` token ids, and half of the model's context: engines keep some of it for themselves."""
    config = read_config(hf_checkpoint)
    config = config.get("text_config", config)
    context = int(config.get("max_position_embeddings", 2 * max_tokens))
    length = min(context // 2, max_tokens)
    return canary_tokens(source.texts(), int(config["vocab_size"]), length=length)
