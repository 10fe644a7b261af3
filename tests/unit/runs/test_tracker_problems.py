"""A tracker that cannot work is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from miles_async.arguments import Arguments, ObservabilityArguments
from miles_async.runs.checks import tracker_problems
from miles_async.runtime import packages
from miles_async.runtime.network.keys import METRICS_KEY_VARIABLE

EXTRAS = ("tensorboard", "mlflow", "trackio", "swanlab")


def problems(**flags: object) -> list[str]:
    return list(tracker_problems(Arguments(observability=ObservabilityArguments(**flags))))


def without(*missing: str) -> Callable[[str], object]:
    return lambda name: None if name in missing else find_spec(name)


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_KEY_VARIABLE, raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(packages, "find_spec", without(*EXTRAS))
    used = {f"use_{extra}": True for extra in EXTRAS}
    *missing, prometheus, server = problems(**used, use_prometheus=True)
    assert missing == [
        f"--use-{extra}: the package {extra} is not installed: pip install 'miles-async[{extra}]'" for extra in EXTRAS
    ]
    assert "--mlflow-tracking-uri" in server
    assert f"export {METRICS_KEY_VARIABLE}=" in prometheus


def test_a_run_that_uses_none_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_KEY_VARIABLE, raising=False)
    monkeypatch.setattr(packages, "find_spec", without(*EXTRAS))
    assert problems() == []
    monkeypatch.setenv(METRICS_KEY_VARIABLE, "k")
    assert problems(use_prometheus=True) == []
