"""The prompts of a run: the tokenizer's part of their checks, made by the dry run and again where they are used."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import EvaluationSet
from miles_async.arguments.prompt_limit import PromptLimit, prompt_limit, response_length
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.picture_processor import load_picture_processor
from miles_async.staleness.events import EpochBegan


def open_source(
    arguments: Arguments,
    template: ChatTemplate,
    *,
    held_out: EvaluationSet | None = None,
    began: Callable[[EpochBegan], None] = lambda event: None,
) -> FilePromptSource:
    """The prompts of training, or of ``held_out`` ones. ``began``: called when an epoch begins.

    Raises ConfigurationError if the template cannot render them, and DataError if all are too long.
    """
    data = arguments.data if held_out is None else held_out.data(arguments.data)
    limit = prompt_limit(arguments, held_out)
    anyway = arguments.checkpoint.load_anyway
    processor = load_picture_processor(arguments.model.directory)
    expand = None if processor is None else processor.expand
    source = FilePromptSource(data, template.encode, limit, anyway=anyway, began=began, expand=expand)
    source.require_rendered(template.check)
    source.require_usable()
    return source


def prompt_notes(arguments: Arguments, source: FilePromptSource, template: ChatTemplate) -> Iterator[str]:
    """Notes about the training prompts before a run starts."""
    yield from turn_end_notes(arguments, template)
    yield from source.skip_notes(template.check)
    yield from length_notes(arguments, source, prompt_limit(arguments))


def length_notes(arguments: Arguments, source: FilePromptSource, limit: PromptLimit | None) -> Iterator[str]:
    """One line about skipped training prompts, and one about prompts whose samples may outgrow a micro-batch.

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
            f"{source.name}: {len(skipped)} of {len(source)} prompts are skipped: they have up to {max(skipped)} "
            f"tokens, and {limit.reason}"
        )
    if room is None:
        return
    consequence = f"exceed --max-tokens-per-gpu {most}, and then get separate micro-batches, which take more memory"
    if room <= 0:
        yield f"with {flag} {response} samples of any prompt may {consequence}"
        return
    long = [tokens for tokens in lengths if tokens > room and (limit is None or tokens <= limit.tokens)]
    if long:
        yield (
            f"{source.name}: {len(long)} of {len(source)} prompts have up to {max(long)} tokens; with {flag} "
            f"{response} their samples may {consequence}"
        )


def turn_end_notes(arguments: Arguments, template: ChatTemplate) -> Iterator[str]:
    """One line if the chat template ends the assistant's turn with text that does not stop engines."""
    if not arguments.data.apply_chat_template:
        return
    texts = [template.decode_all([token]) for token in sorted(template.stop_ids)]
    after = template.after_answer()
    if not after.strip() or any(text in after for text in (*texts, *arguments.rollout.rollout_stop)):
        return
    ids = template.tokenize(after)
    specials = [(template.decode_all([token]), token) for token in ids if not template.decode([token])]
    end, add = after.strip().splitlines()[0], ""
    if specials:
        end, token = specials[0]
        add = f"add {token} to eos_token_id in generation_config.json, or "
    yield (
        f"the chat template of --hf-checkpoint ends the assistant's turn with {end!r}, and engines stop at "
        f"{', '.join(map(repr, texts)) or 'no token'}: a response that ends as the template does continues to its "
        f"limit of length. To end it, {add}give --rollout-stop {shlex.quote(end)}"
    )
