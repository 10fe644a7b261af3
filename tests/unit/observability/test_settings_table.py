"""Flags as one table."""

from __future__ import annotations

from dataclasses import asdict

from miles_async.arguments import Arguments, ObservabilityArguments
from miles_async.observability.tracker_parts import flat_settings


def test_every_flag_of_a_run_is_there_once() -> None:
    settings = asdict(Arguments(observability=ObservabilityArguments(use_wandb=True)))
    found = flat_settings(settings)
    assert found["use_wandb"] == "True"
    assert found["run_dir"] == "runs/latest"
    assert len(found) == sum(len(group) for group in settings.values())
