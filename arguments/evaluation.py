"""Evaluation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """Evaluation"""

    eval_prompt_data: Path | None = flag(
        None, "held-out prompts, same columns as --prompt-data (default: no evaluation)"
    )
    eval_interval: int | None = flag(None, "rollout steps between evaluations (default: only first and last)")
    n_samples_per_eval_prompt: int = flag(1, "samples per held-out prompt")
    eval_temperature: float = flag(0.0, "temperature of evaluation; 0: greedy")
    eval_max_response_len: int | None = flag(None, "tokens an evaluation response may have (default: as training)")
    eval_concurrency: int = flag(128, "evaluation samples in flight at most")
