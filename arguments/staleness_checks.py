"""Checks of the age bound, the lead and the order of batches together (C3, C4)."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.problems import given

LEAD_WITH_A_CHOICE = 4
"""Fewest batches of lead with which more than a batch waits when one is cut."""


def check_staleness(arguments: Arguments) -> Iterator[str]:
    """Check that age bound and lead agree, and that no combination of flags can deadlock (C3, C4)."""
    staleness, weights = arguments.staleness, arguments.weights
    bound, asked_lead = staleness.max_weight_staleness, staleness.max_rollout_lead
    if staleness.on_policy:  # age 0 and lead 1 keep within any --max-weight-staleness and --max-rollout-lead
        contradictions = {
            f"--update-weights-interval {weights.update_weights_interval}": weights.update_weights_interval != 1,
            f"--debug-publication-lag {weights.debug_publication_lag}": weights.debug_publication_lag != 0,
        }
        for flag in given(contradictions):
            yield f"--on-policy alternates strictly with the current weights, which {flag} contradicts"
        return
    if bound is None or bound < 0:  # the latter is reported already
        return
    if asked_lead is not None and asked_lead > bound + 1:
        yield (
            f"--max-rollout-lead {asked_lead} is more than --max-weight-staleness {bound} + 1: what is admitted "
            f"further ahead would be too old when it is trained; lower the lead to {bound + 1} or raise the bound"
        )
    if weights.debug_publication_lag > bound:
        yield (
            f"--debug-publication-lag {weights.debug_publication_lag} makes every sample older than "
            f"--max-weight-staleness {bound}: nothing could ever be trained; raise the bound, or use none"
        )
    if weights.debug_publication_lag and staleness.stale_group_action == "wait":
        yield (
            f"--debug-publication-lag {weights.debug_publication_lag} with --stale-group-action wait: a publication "
            "waits by the version under which attempts were admitted, and the lag makes their tokens older than that; "
            "use recycle or drop, or no lag"
        )


def check_batch_order(arguments: Arguments) -> Iterator[str]:
    """Check that an order by rewards has several rewards and groups to choose from, and cannot starve a group."""
    order, staleness, samples = arguments.staleness.batch_order, arguments.staleness, arguments.rollout
    if order != "reward_variance":
        return
    if staleness.bound is None:
        yield (
            f"--batch-order {order} without a bound: groups whose rewards vary little would wait forever; give "
            "--max-weight-staleness, at which they are swept"
        )
    if staleness.lead < LEAD_WITH_A_CHOICE:
        yield (
            f"--batch-order {order} has nothing to choose from with a lead of {staleness.lead} batches: one is being "
            "trained, the slots of the one before are being filled again, and a batch is cut as soon as it is full; "
            f"use --max-rollout-lead of at least {LEAD_WITH_A_CHOICE}, which takes a --max-weight-staleness of "
            f"{LEAD_WITH_A_CHOICE - 1} or more"
        )
    if samples.n_samples_per_prompt == 1:
        yield f"--batch-order {order} with --n-samples-per-prompt 1: one reward does not vary; use at least 2"
