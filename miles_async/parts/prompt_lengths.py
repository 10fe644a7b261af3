"""Notes on the lengths of training prompts, made before a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from arguments import Arguments
from arguments.prompt_limit import PromptLimit, response_length
from miles_async.prompts.source import FilePromptSource


def length_notes(arguments: Arguments, source: FilePromptSource, limit: PromptLimit | None) -> Iterator[str]:
    """One line about training prompts that are skipped, and one about those whose samples may outgrow a micro-batch."""
    if limit is not None and (skipped := source.lengths_above(limit.tokens)):
        yield (
            f"{source.path}: {len(skipped)} of {len(source)} prompts are skipped: they have up to {max(skipped)} "
            f"tokens, and {limit.reason}"
        )
    if arguments.sessions.is_multi_turn:  # trajectories end at --max-tokens-per-gpu
        return
    flag, response = response_length(arguments)
    most = arguments.optimizer.max_tokens_per_gpu
    long = [tokens for tokens in source.lengths_above(most - response) if limit is None or tokens <= limit.tokens]
    if long:
        yield (
            f"{source.path}: {len(long)} of {len(source)} prompts have up to {max(long)} tokens; with {flag} "
            f"{response} their samples may exceed --max-tokens-per-gpu {most}, and then get micro-batches of their "
            "own, which take more memory"
        )
