"""Notes on the lengths of training prompts, made before a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.prompt_limit import PromptLimit, response_length
from miles_async.prompts.source import FilePromptSource


def length_notes(arguments: Arguments, source: FilePromptSource, limit: PromptLimit | None) -> Iterator[str]:
    """One line about training prompts that are skipped, and one about those whose samples may outgrow a micro-batch.

    Only long prompts are tokenized, and once: there may be millions.
    """
    flag, response = response_length(arguments)
    most = arguments.micro_batch_tokens
    room = None if arguments.sessions.is_multi_turn else most - response  # else trajectories end at the limit
    bounds = [limit.tokens] if limit is not None else []
    if room is not None and room > 0:
        bounds.append(room)
    lengths = source.lengths_above(min(bounds)) if bounds else []
    skipped = [tokens for tokens in lengths if limit is not None and tokens > limit.tokens]
    if limit is not None and skipped:
        yield (
            f"{source.path}: {len(skipped)} of {len(source)} prompts are skipped: they have up to {max(skipped)} "
            f"tokens, and {limit.reason}"
        )
    if room is None:
        return
    consequence = f"exceed --max-tokens-per-gpu {most}, and then get micro-batches of their own, which take more memory"
    if room <= 0:
        yield f"with {flag} {response} samples of any prompt may {consequence}"
        return
    long = [tokens for tokens in lengths if tokens > room and (limit is None or tokens <= limit.tokens)]
    if long:
        yield (
            f"{source.path}: {len(long)} of {len(source)} prompts have up to {max(long)} tokens; with {flag} "
            f"{response} their samples may {consequence}"
        )
