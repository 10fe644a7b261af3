"""Decides whether the run continues after the trainer skipped an optimizer step that would have harmed the weights.

Ranks skip a bad optimizer step and report its reason (``train/bad_steps/REASON``); this module knows the prompts of the
batch and ``--bad-step-action``.

The batch of a bad step is spent either way. If the run continues, its groups end as trained, so none is trained twice
or lost, and the version still increases: ages are at least what they would be without the bad step, so the staleness
bound holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.errors import TrainerError
from miles_async.types import PreparedBatch

log = structlog.get_logger(__name__)

PREFIX = "bad_steps/"
"""Begins the names of the trainer's metrics that count bad steps, by reason."""

REMEDIES = {
    "grad_norm": "the gradient was not finite, or its norm above --grad-norm-limit; maybe lower --lr or --clip-grad",
    "logprob_diff": "log-probs of trainer and engines on the same weights differ by more than --max-logprob-diff; "
    "compare their settings (dtypes, attention, temperature)",
    "critic_grad_norm": "the gradient of the critic was not finite; maybe lower --critic-lr or --clip-grad",
}


class BadSteps:
    """Counts rollout steps in a row that had a bad optimizer step."""

    def __init__(self, arguments: OptimizerArguments) -> None:
        self._action = arguments.bad_step_action
        self._most = arguments.max_bad_steps
        self._in_a_row = 0

    def judge(self, batch: PreparedBatch, metrics: Mapping[str, float]) -> None:
        """Judge what the trainer reported of ``batch``. Raises TrainerError if the run is to end."""
        reasons = [name.removeprefix(PREFIX) for name, count in metrics.items() if name.startswith(PREFIX) and count]
        if not reasons:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        found = ", ".join(f"{reason} {metrics.get(f'bad_{reason}', float('nan')):g}" for reason in reasons)
        prompts = ", ".join(batch.prompt_ids)
        if self._action == "skip" and self._in_a_row < self._most:
            log.warning("an optimizer step was not made", found=found, version=batch.target_version, prompts=prompts)
            return
        why = "; ".join(REMEDIES.get(reason, reason) for reason in reasons)
        stopped = (
            f"That was so in {self._in_a_row} rollout steps in a row (--max-bad-steps)."
            if self._action == "skip"
            else "To continue without such steps: --bad-step-action skip."
        )
        raise TrainerError(
            f"an optimizer step from weight version {batch.target_version} was not made: {found}. {why}. {stopped} "
            f"Resume from the last checkpoint. Prompts of the batch: {prompts}"
        )
