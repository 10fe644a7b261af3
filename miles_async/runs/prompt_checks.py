"""Checks of prompt files before a run starts: rows, rewards, lengths, and that a resumed run has the same prompts."""

from __future__ import annotations

import msgspec

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.needs import reward_notes
from miles_async.checkpoints.files import EXAMPLES_FILE, ROLLOUT_FILE, find_checkpoint
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.prompts.earlier_rates import earlier_rates
from miles_async.prompts.identity import changed_prompts
from miles_async.prompts.layouts import lacking
from miles_async.prompts.rows import open_prompts
from miles_async.rewards.row_check import RewardOfRow
from miles_async.types import JsonObject


def check_prompts(arguments: Arguments) -> tuple[dict[str, int], list[str]]:
    """Check every row, its reward too; path → number of prompts, and notes.

    Raises DataError naming file and line, ConfigurationError if ``--load`` would continue among other prompts.
    """
    counts, notes, names = dict[str, int](), list[str](), set[str]()
    held_out = [
        (each.data(arguments.data), each.rewards(arguments.rewards), each.metadata_overrides)
        for each in evaluation_sets(arguments.evaluation)
    ]
    for data, rewards, overrides in ((arguments.data, arguments.rewards, {}), *held_out):
        rewarded = rewards.rm_type is not None and not arguments.algorithm.supervised
        check = RewardOfRow(rewards, overrides)
        rows = open_prompts(data, check if rewarded else None)
        names |= check.names
        earlier = earlier_rates(rows, data)
        if earlier:
            notes.append(f"--pass-rates: known of {len(earlier)} of {len(rows)} prompts")
        if data is arguments.data and (cursor := _saved_cursor(arguments)):
            try:
                notes += changed_prompts(cursor, rows, data, earlier, arguments.checkpoint.load_anyway)
            except CheckpointError as error:
                raise ConfigurationError(f"--load {arguments.checkpoint.load}: {error}") from None
        for (_, place), file in zip(data.places, rows.files, strict=True):
            counts[place] = len(file)
            if file.layout is not None:
                notes.append(f"{place}: has the columns of {file.layout.describe()}")
            for flag, key in {"--metadata-key": data.metadata_key, "--tool-key": data.tool_key}.items():
                if key is not None and (number := lacking(file, key)):
                    notes.append(f"{place}: {number} of {len(file)} rows have no {key!r} ({flag})")
    notes += reward_notes(arguments, names)
    return counts, notes


def check_tokenizer(arguments: Arguments) -> list[str]:
    """Return notes on skipped rows, on prompt lengths and on the end of turns.

    Raises ConfigurationError, or DataError if all prompts of a file are too long.

    For the dry run: in a run the rollout process does this before it starts an engine, and importing transformers
    takes seconds.
    """
    from miles_async.wiring.generation import run_template
    from miles_async.wiring.run_prompts import open_source, prompt_notes

    if arguments.algorithm.supervised:
        from miles_async.wiring.prepared_batches import example_source

        examples = example_source(arguments)
        return list(examples.skip_notes(examples.check))
    template = run_template(arguments)
    notes = list(prompt_notes(arguments, open_source(arguments, template), template))
    for held_out in evaluation_sets(arguments.evaluation):
        open_source(arguments, template, held_out=held_out)
    return notes


def _saved_cursor(arguments: Arguments) -> JsonObject | None:
    """The prompt cursor of the checkpoint to resume from; None if there is none."""
    load = arguments.checkpoint.load
    if load is None:
        return None
    try:
        directory = find_checkpoint(load).directory
        if arguments.algorithm.supervised:
            return msgspec.json.decode((directory / EXAMPLES_FILE).read_bytes(), type=JsonObject)
        return msgspec.json.decode((directory / ROLLOUT_FILE).read_bytes(), type=dict[str, JsonObject])["source"]
    except (OSError, UnicodeDecodeError, KeyError, msgspec.MsgspecError):  # the load says what is wrong with it
        return None
