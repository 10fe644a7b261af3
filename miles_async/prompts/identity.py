"""Identity of the prompts that a cursor points into: their content, and the flags that decide their order."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_files import HUB, hub_name, split_slice
from miles_async.errors import CheckpointError
from miles_async.prompts.rows import PromptRows
from miles_async.types import JsonObject

CHANGED = "prompt_data"
"""Name for ``--load-anyway``."""

_FLAGS = {
    "shuffle": "--rollout-shuffle",
    "seed": "--rollout-seed",
    "weights": "--prompt-data-weights",
    "sampler": "--prompt-sampler",
    "pass_rates": "--pass-rates",
}
_SOMETIMES = ("revision", "weights", "sampler", "pass_rates")  # keys that a state may lack


def identity(rows: PromptRows, arguments: DataArguments, earlier: Mapping[int, float]) -> JsonObject:
    """Facts that stay the same in a run that resumes; lists, with an entry per file, if there are several.

    ``earlier``: row → pass rate in earlier runs.
    """
    facts: dict[str, Sequence[object]] = {
        "file": [file.label for file in rows.files],
        "rows": [len(file) for file in rows.files],
        "digest": [file.digest for file in rows.files],
        "revision": [file.revision for file in rows.files],
    }
    alone = len(rows.files) == 1
    found = {name: values[0] if alone else values for name, values in facts.items() if any(values)}
    found |= {"shuffle": arguments.rollout_shuffle, "seed": arguments.rollout_seed}
    if arguments.weights:
        found["weights"] = list(arguments.weights)
    if arguments.prompt_sampler == "difficulty":
        window = (arguments.difficulty_low, arguments.difficulty_high, arguments.difficulty_rest)
        found["sampler"] = f"difficulty, from {window[0]:g} to {window[1]:g}, else in one of {window[2]} epochs"
    elif arguments.prompt_sampler != "uniform":
        found["sampler"] = arguments.prompt_sampler
    if earlier:
        digest = hashlib.blake2b(msgspec.json.encode(sorted(earlier.items())), digest_size=8).hexdigest()
        found["pass_rates"] = f"{len(earlier)} prompts, {digest}"
    return found


def changed_prompts(
    state: JsonObject,
    rows: PromptRows,
    arguments: DataArguments,
    earlier: Mapping[int, float],
    anyway: Collection[str],
) -> Sequence[str]:
    """Describe how these rows in this order differ from ``state``, a cursor.

    Raises CheckpointError unless nothing does, or ``anyway`` (``--load-anyway``) accepts it.
    """
    found = identity(rows, arguments, earlier)
    names = [name for name in dict.fromkeys((*found, *_SOMETIMES)) if state.get(name) != found.get(name)]
    if not names:
        return ()
    if CHANGED in anyway:
        return [f"{CHANGED}: {name} was {state.get(name)!r} and is {found.get(name)!r}" for name in names]
    changes = "; ".join(
        f"{name} was {state.get(name)!r} when the checkpoint was written and is {found.get(name)!r} now"
        for name in names
    )
    flags = dict.fromkeys(_FLAGS.get(name, "--prompt-data") for name in names)
    raise CheckpointError(
        f"{_changed_files(state, rows)}: cannot continue in the middle of other prompts: {changes}. Restore "
        f"{' and '.join(flags)}{_pinned(state, rows, arguments)}, or if the change is meant, add --load-anyway "
        f"{CHANGED}: the run then continues with the next epoch of the new ones"
    )


def _changed_files(state: JsonObject, rows: PromptRows) -> str:
    """Files that differ from the cursor's, or all."""
    saved = state.get("digest")
    digests = saved if isinstance(saved, list) else [saved]
    changed = [file.place for file in rows.files if file.digest not in digests]
    return ", ".join(changed) or rows.name


def _pinned(state: JsonObject, rows: PromptRows, arguments: DataArguments) -> str:
    """How to name the commits of the cursor."""
    saved = state.get("revision")
    commits = saved if isinstance(saved, list) else [saved] * len(rows.files)
    places = [split_slice(place)[0] for _, place in arguments.places]
    pinned = [
        hub_name(place).at(commit)
        for place, commit in zip(places, commits, strict=False)
        if place.startswith(HUB) and commit is not None
    ]
    return f" ({' '.join(pinned)})" if pinned else ""
