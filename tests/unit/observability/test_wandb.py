"""Opening a W&B run: failures that are tried again (M12). The real wandb is in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina
import wandb

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability.wandb_tracker import INIT_ATTEMPTS, WandbOptions, WandbTracker, wandb_mode
from tests.json_dict import JsonDict


class FakeRun:
    def define_metric(self, *_: object, **__: object) -> None: ...


class FakeInit:
    """Fails with the given errors, one per call, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[JsonDict] = []

    def __call__(self, **arguments: object) -> FakeRun:
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
    assert len({call["id"] for call in init.calls}) == 3  # wandb refuses the id of an attempt that failed


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
def test_an_offline_run_is_never_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, object], mode: str
) -> None:
    # covers: M12
    init = FakeInit()
    monkeypatch.setattr(wandb, "init", init)
    WandbTracker(WandbOptions(directory=tmp_path, label="rank 3", **options))
    (call,) = init.calls
    assert call["mode"] == mode
    assert call["settings"].x_label == "rank 3"
    assert call["settings"].init_timeout == 300.0


def test_the_run_has_the_name_of_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit()
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    WandbTracker(WandbOptions(directory=tmp_path / "qwen3-4b"))
    monkeypatch.setenv("WANDB_NAME", "mine")
    WandbTracker(WandbOptions(directory=tmp_path / "qwen3-4b"))
    assert [call["name"] for call in init.calls] == ["qwen3-4b", "mine"]


def test_a_server_that_cannot_be_used_costs_no_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit(wandb.errors.UsageError("no key"))
    monkeypatch.setattr(wandb, "init", init)
    WandbTracker(WandbOptions(directory=tmp_path, mode="online"))
    assert [call["mode"] for call in init.calls] == ["online", "offline"]
    assert init.calls[0]["id"] != init.calls[1]["id"]


@pytest.mark.parametrize(
    ("flag", "variable", "mode"),
    [
        (None, None, "online"),
        (None, "", "online"),
        (None, "offline", "offline"),
        (None, "dryrun", "offline"),
        (None, "disabled", "disabled"),
        ("online", "offline", "online"),
        ("offline", "online", "offline"),
    ],
)
def test_wandb_is_online_unless_flag_or_variable_says_otherwise(
    flag: str | None, variable: str | None, mode: str
) -> None:
    environment = {} if variable is None else {"WANDB_MODE": variable}
    assert wandb_mode(ObservabilityArguments(use_wandb=True, wandb_mode=flag), environment) == mode
    assert wandb_mode(ObservabilityArguments(wandb_mode=flag), environment) == "disabled"


def test_a_mode_that_wandb_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="WANDB_MODE=ofline: expected one of online, offline, disabled"):
        wandb_mode(ObservabilityArguments(use_wandb=True), {"WANDB_MODE": "ofline"})
