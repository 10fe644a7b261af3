"""Evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.flag import flag
from miles_async.arguments.prompt_files import default_name, named_places
from miles_async.errors import ConfigurationError

_HELD_OUT = ("eval_prompt_data", "eval_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """Evaluation"""

    eval_prompt_data: tuple[str, ...] | None = flag(
        None,
        "files of held-out prompts, with the columns of --prompt-data; a name before a file names its metrics, such as "
        "aime data/aime-2025.jsonl gsm8k data/test.parquet (default: no evaluation)",
        metavar="[NAME] PATH",
    )
    eval_config: Path | None = flag(
        None,
        "YAML or JSON file of held-out data sets with separate settings: reward, samples, temperature, limits, "
        "interval, columns and engines (docs/evaluation.md)",
        metavar="FILE",
    )
    eval_only: bool = flag(
        False,
        "evaluate the weights of --hf-checkpoint once and end; no trainer starts, and flags of training have no effect "
        "(`miles-async rollout` and `miles-async eval` set it)",
        needs=_HELD_OUT,
    )
    eval_interval: int | None = flag(
        None, "rollout steps between evaluations (default: only first and last)", needs=_HELD_OUT, at_least=1
    )
    n_samples_per_eval_prompt: int = flag(1, "samples per held-out prompt", needs=_HELD_OUT, at_least=1)
    eval_temperature: float | None = flag(
        None,
        "temperature of evaluation; 0: greedy (default: greedy, and with several samples per held-out prompt "
        "--rollout-temperature)",
        needs=_HELD_OUT,
        at_least=0,
    )
    eval_top_p: float = flag(1.0, "nucleus sampling of evaluation", needs=_HELD_OUT, above=0, at_most=1)
    eval_top_k: int = flag(-1, "evaluation samples from the k likeliest tokens; -1: all", needs=_HELD_OUT)
    eval_max_response_len: int | None = flag(
        None, "tokens an evaluation response may have (default: as in training)", needs=_HELD_OUT, at_least=1
    )
    eval_concurrency: int = flag(128, "maximum number of evaluation samples in flight", needs=_HELD_OUT, at_least=1)

    @property
    def evaluates(self) -> bool:
        """True if there are held-out prompts."""
        return self.eval_prompt_data is not None or self.eval_config is not None


def parse_data_sets(words: Sequence[str]) -> dict[str, str]:
    """Name → place. Raises ConfigurationError.

    >>> parse_data_sets(["aime", "data/aime-2025.jsonl", "held_out.jsonl"])
    {'aime': 'data/aime-2025.jsonl', 'held_out': 'held_out.jsonl'}
    """
    data_sets: dict[str, str] = {}
    for given, place in named_places(words, "--eval-prompt-data"):
        name = given or default_name(place)
        if name in data_sets:
            raise ConfigurationError(
                f"--eval-prompt-data: {data_sets[name]} and {place} are both called {name}: give one a name before it"
            )
        data_sets[name] = place
    return data_sets
