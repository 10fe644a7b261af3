"""The text that engines and the trainer score at every publication: the first prompts of the run."""

from __future__ import annotations

import json
from pathlib import Path

from miles_async.prompts.source import FilePromptSource
from miles_async.weights.verify import CANARY_LENGTH, canary_tokens


class Canary:
    """A part of the rollout actor, which has the prompts; the driver brings it to the trainer."""

    def __init__(self, source: FilePromptSource, hf_checkpoint: Path, max_tokens: int) -> None:
        """Of at most ``max_tokens``, and within the context of the model."""
        config = json.loads((hf_checkpoint / "config.json").read_text())
        config = config.get("text_config", config)
        context = int(config.get("max_position_embeddings", CANARY_LENGTH + 1))
        length = min(CANARY_LENGTH, context - 1, max_tokens)
        self._tokens = canary_tokens(source.texts(), int(config["vocab_size"]), length=length)

    async def tokens(self) -> tuple[int, ...]:
        """Token ids."""
        return self._tokens
