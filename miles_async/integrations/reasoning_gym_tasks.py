"""``--environment reasoning_gym:TASK``: questions that a task generates, for ``--rm-type reasoning_gym``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import reasoning_gym

from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject


def rows(task: str, config: Mapping[str, object], count: int, seed: int) -> Iterator[JsonObject]:
    """Yield prompts with label and metadata. ``config``: the task's own settings.

    Raises ConfigurationError for tasks that don't exist, settings that they don't have, and tasks whose entries are not
    JSON, in which prompts are kept.
    """
    try:
        entries = reasoning_gym.create_dataset(task, size=count, seed=seed, **config)
    except Exception as error:  # the package's own checks are assertions and errors of many kinds
        raise ConfigurationError(f"{type(error).__name__}: {error}") from error
    for number in range(count):
        entry = entries[number]
        answer = entry["answer"]  # None: any answer that solves it is right
        row = {
            "prompt": entry["question"],
            "metadata": entry["metadata"],
            **({} if answer is None else {"label": answer}),
        }
        try:
            kept = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"its entries cannot be kept as JSON: {error}") from None
        if number == 0:
            read = {"question": kept["prompt"], "answer": kept.get("label"), "metadata": kept["metadata"]}
            if entries.score_answer(answer, entry) != entries.score_answer(answer, read):
                raise ConfigurationError("its own answer is scored differently when its entry was kept as JSON")
        yield kept
