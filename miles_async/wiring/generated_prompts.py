"""The prompts that ``--environment`` generates, in folders named by their content, so that runs may share them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.sessions import parse_environment
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject
from miles_async.wiring.environments import environment_rows

EVALUATION = "environment"
"""Name of the data set of ``--environment-eval-prompts``."""


def with_generated_prompts(arguments: Arguments) -> Arguments:
    """The arguments with ``--prompt-data`` and all that says how to read it, if ``--environment`` generates prompts.

    The same flags give the same files. Raises ConfigurationError.
    """
    sessions, data, evaluation = arguments.sessions, arguments.data, arguments.evaluation
    if sessions.environment is None or data.prompt_data is not None:
        return arguments
    if evaluation.eval_prompt_data is not None:
        raise ConfigurationError(
            f"--environment {sessions.environment} generates prompts, and --eval-prompt-data would be read like them: "
            "give --environment-eval-prompts instead, or --prompt-data too"
        )
    kind, name = parse_environment(sessions.environment)
    trained, held_out = sessions.environment_prompts, sessions.environment_eval_prompts
    rows = environment_rows(sessions, data.rollout_seed)
    trained = min(trained, len(rows) - held_out)  # a data set may have fewer
    if trained < 1:
        raise ConfigurationError(
            f"--environment {sessions.environment} has {len(rows)} prompts, and --environment-eval-prompts {held_out} "
            "leave none to train"
        )
    directory = arguments.observability.run_dir.absolute().parent / "environment-prompts"
    path = str(_written(directory, f"{kind}-{name}", rows[:trained]))
    labelled = all("label" in row for row in rows)
    data = replace(
        data, prompt_data=(path,), input_key="prompt", label_key="label" if labelled else None, metadata_key="metadata"
    )
    if held_out:
        data_set = (EVALUATION, str(_written(directory, f"{kind}-{name}", rows[trained:])))
        evaluation = replace(evaluation, eval_prompt_data=data_set)
    rewards = arguments.rewards
    if kind == "reasoning_gym" and rewards.rm_type is None and rewards.custom_rm_path is None:
        rewards = replace(rewards, rm_type="reasoning_gym")
    return replace(arguments, data=data, evaluation=evaluation, rewards=rewards)


def _written(directory: Path, name: str, rows: Iterable[JsonObject]) -> Path:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) + ".jsonl"  # its stem is the name of the data set
    path = directory / hashlib.sha256(content.encode()).hexdigest()[:16] / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(content, encoding="utf-8")
            whole.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"the prompts of --environment cannot be written to {path} (next to --run-dir): {error}"
        ) from error
    return path
