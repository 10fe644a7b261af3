"""One W&B run of several processes (``--wandb-shared``): the driver is its primary, and logs all metrics; secondaries
add what W&B measures of their machines, each under its own label.
"""

from __future__ import annotations

from dataclasses import replace

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.tracker_parts import earlier_run_id
from miles_async.observability.wandb_tracker import NAME, WandbOptions, new_run_id, open_wandb, wandb_mode


def with_shared_id(arguments: ObservabilityArguments) -> ObservabilityArguments:
    """Choose the id of the run before its processes start, if they share it. Raises ConfigurationError."""
    if not _is_shared(arguments) or arguments.wandb_run_id is not None:
        return arguments
    return replace(arguments, wandb_run_id=earlier_run_id(NAME) or new_run_id())


def report_machine(arguments: ObservabilityArguments, label: str) -> BackgroundTracker | None:
    """Let W&B measure this machine until the process ends; None if the run is not shared.

    ``label``: no other process of the run has it.
    """
    if not _is_shared(arguments) or arguments.wandb_run_id is None:
        return None
    return open_wandb(
        WandbOptions(
            directory=arguments.run_dir,
            mode="online",
            project=arguments.wandb_project,
            group=arguments.wandb_group,
            run_id=arguments.wandb_run_id,
            shared=True,
            label=label,
            primary=False,
        )
    )


def _is_shared(arguments: ObservabilityArguments) -> bool:
    return arguments.wandb_shared and wandb_mode(arguments) == "online"
