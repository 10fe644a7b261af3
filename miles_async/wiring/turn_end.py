"""A note, before a run starts, on turns that nothing ends."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import read_config
from miles_async.prompts.templates import ChatTemplate


def turn_end_notes(arguments: Arguments, template: ChatTemplate) -> Iterator[str]:
    """One line if the chat template ends the assistant's turn with text that does not stop engines."""
    if not arguments.data.apply_chat_template or arguments.model.hf_checkpoint is None:
        return
    named = read_config(arguments.model.hf_checkpoint).get("eos_token_id") or []  # which engines heed as well
    stops = template.stop_ids.union(named if isinstance(named, list) else [named])
    texts = [template.decode_all([token]) for token in sorted(stops)]
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
        f"{', '.join(map(repr, texts)) or 'no token'}: a response that ends as the template does goes on to its limit "
        f"of length. To end it, {add}give --rollout-stop {shlex.quote(end)}"
    )
