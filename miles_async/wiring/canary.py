"""The text that engines and the trainer score at every publication: the first prompts of the run."""

from __future__ import annotations

import json
from pathlib import Path

from miles_async.prompts.source import FilePromptSource
from miles_async.weights.verify import CANARY_LENGTH, canary_tokens


class Canary:
    """A part of the rollout actor, which has the prompts; the driver brings it to the trainer."""

    def __init__(self, source: FilePromptSource, hf_checkpoint: Path, max_tokens: int) -> None:
        """At most ``max_tokens`` tokens, and half of the model's context: engines keep some of it for themselves."""
        config = json.loads((hf_checkpoint / "config.json").read_text())
        config = config.get("text_config", config)
        context = int(config.get("max_position_embeddings", 2 * CANARY_LENGTH))
        length = min(CANARY_LENGTH, context // 2, max_tokens)
        self._tokens = canary_tokens(source.texts(), int(config["vocab_size"]), length=length)

    async def tokens(self) -> tuple[int, ...]:
        """Token ids."""
        return self._tokens
