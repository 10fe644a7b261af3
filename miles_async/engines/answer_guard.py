"""Check what an inference server generated against what it was asked."""

from __future__ import annotations

from miles_async.errors import TransientEngineError
from miles_async.types import GenerateRequest, ServerAnswer


def check_answer(answer: ServerAnswer, request: GenerateRequest, vocabulary: int | None, url: str) -> None:
    """Raise TransientEngineError unless the answer is one to this request.

    ``vocabulary``: number of token ids of the model; None where it is not known.
    """
    tokens, most = answer.output_ids, request.sampling.get("max_new_tokens")
    if most is not None and len(tokens) > most:
        raise TransientEngineError(f"{url}: expected at most {most} tokens (max_new_tokens), found {len(tokens)}")
    if not len(tokens):
        return
    if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
        last = "" if vocabulary is None else f" to {vocabulary - 1}, those of config.json"
        raise TransientEngineError(f"{url}: expected token ids from 0{last}, found {tokens.min()} to {tokens.max()}")
