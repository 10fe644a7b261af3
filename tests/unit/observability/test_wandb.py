"""Opening a W&B run: failures that are tried again (M12). The real wandb is in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stamina
import wandb

from miles_async.observability.wandb_tracker import INIT_ATTEMPTS, WandbOptions, WandbTracker


class FakeRun:
    def define_metric(self, *_: Any, **__: Any) -> None: ...


class FakeInit:
    """Fails with the given errors, one per call, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> FakeRun:
        self.calls.append(arguments)
        if self.errors:
            raise self.errors.pop(0)
        return FakeRun()


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=INIT_ATTEMPTS):
        yield


def test_communication_errors_are_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit(wandb.errors.CommError("timed out"), wandb.errors.CommError("timed out"))
    monkeypatch.setattr(wandb, "init", init)
    WandbTracker(WandbOptions(directory=tmp_path))
    assert len(init.calls) == 3


def test_retries_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit(*[wandb.errors.CommError("timed out")] * 10)
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(wandb.errors.CommError):
        WandbTracker(WandbOptions(directory=tmp_path))
    assert len(init.calls) == INIT_ATTEMPTS


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit(wandb.errors.UsageError("no key"))
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(wandb.errors.UsageError):
        WandbTracker(WandbOptions(directory=tmp_path))
    assert len(init.calls) == 1


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "offline"),
        ({"shared": True}, "offline"),
        ({"mode": "online"}, "online"),
        ({"mode": "online", "shared": True}, "shared"),
    ],
)
def test_offline_is_the_default_and_is_never_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], mode: str
) -> None:
    # covers: M12
    init = FakeInit()
    monkeypatch.setattr(wandb, "init", init)
    WandbTracker(WandbOptions(directory=tmp_path, label="rank 3", **options))
    (call,) = init.calls
    assert call["mode"] == mode
    assert call["settings"].x_label == "rank 3"
    assert call["settings"].init_timeout == 300.0
