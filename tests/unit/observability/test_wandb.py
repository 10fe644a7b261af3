"""Opening a W&B run: failures that are tried again (M12). The real wandb is in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina
import wandb

from miles_async.arguments.observability import ObservabilityArguments, WandbMode
from miles_async.errors import ConfigurationError
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.trackers import open_trackers
from miles_async.observability.wandb_tracker import INIT_ATTEMPTS, WandbTracker, wandb_mode
from tests.json_dict import JsonDict
from tests.unit.observability.tracked import restarted
from tests.unit.samples.sample_rows import write_samples


class FakeRun:
    def __init__(self, id: str) -> None:
        self.id = id
        self.logged: list[JsonDict] = []
        self.finished = False

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, metrics: JsonDict) -> None:
        self.logged.append(metrics)

    def finish(self) -> None:
        self.finished = True


class FakeInit:
    """Fails with the given errors, one per call, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[JsonDict] = []
        self.runs: list[FakeRun] = []

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> FakeInit:
        """In the place of ``wandb.init``."""
        init = cls(*errors)
        monkeypatch.setattr(wandb, "init", init)
        return init

    def __call__(self, **arguments: object) -> FakeRun:
        self.calls.append(arguments)
        if self.errors:
            raise self.errors.pop(0)
        self.runs.append(FakeRun(str(arguments["id"])))
        return self.runs[-1]


def opened(
    directory: Path, *, mode: WandbMode = "offline", resume: bool = False, machine: str | None = None, **flags: object
) -> WandbTracker:
    run = TrackedRun(arguments=ObservabilityArguments(run_dir=directory, **flags))
    return WandbTracker(run, mode, "mine", resume=resume, machine=machine)


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=INIT_ATTEMPTS):
        yield


def test_communication_errors_are_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch, wandb.errors.CommError("timed out"), wandb.errors.CommError("timed out"))
    opened(tmp_path)
    assert len({call["id"] for call in init.calls}) == 3  # wandb refuses the id of an attempt that failed


def test_retries_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch, *[wandb.errors.CommError("timed out")] * 10)
    with pytest.raises(wandb.errors.CommError):
        opened(tmp_path)
    assert len(init.calls) == INIT_ATTEMPTS


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch, wandb.errors.UsageError("no key"))
    with pytest.raises(wandb.errors.UsageError):
        opened(tmp_path)
    assert len(init.calls) == 1


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "offline"),
        ({"wandb_shared": True}, "offline"),
        ({"mode": "online"}, "online"),
        ({"mode": "online", "wandb_shared": True}, "shared"),
    ],
)
def test_an_offline_run_is_never_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, object], mode: str
) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch)
    opened(tmp_path, machine="rank 3", **options)
    (call,) = init.calls
    assert call["mode"] == mode
    assert call["settings"].x_label == "rank 3"
    assert call["settings"].init_timeout == 300.0


def test_the_run_has_the_name_of_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    opened(tmp_path / "qwen3-4b")
    monkeypatch.setenv("WANDB_NAME", "mine")
    opened(tmp_path / "qwen3-4b")
    assert [call["name"] for call in init.calls] == ["qwen3-4b", "mine"]


def test_a_server_that_cannot_be_used_costs_no_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch, wandb.errors.UsageError("no key"))
    opened(tmp_path, mode="online")
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
    with pytest.raises(
        ConfigurationError, match="WANDB_MODE=ofline: expected one of online, offline, disabled; did you mean offline"
    ):
        wandb_mode(ObservabilityArguments(use_wandb=True), {"WANDB_MODE": "ofline"})


def test_a_restarted_run_continues_its_wandb_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch)
    arguments = ObservabilityArguments(run_dir=tmp_path / "latest", use_wandb=True, wandb_mode="online")
    open_trackers(arguments, {}).finish()
    (tmp_path / "latest").rename(tmp_path / "latest.1")
    restarted(monkeypatch, tmp_path / "latest.1", tmp_path / "latest.2")  # the second one opened none
    open_trackers(arguments, {}).finish()
    first, second = init.calls
    assert first["id"] == second["id"]
    assert (first["resume"], second["resume"]) == (None, "allow")
    assert (tmp_path / "latest" / "wandb_run_id").read_text() == f"{first['id']}\n"  # for the next restart


def test_a_run_id_of_the_flags_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch)
    (tmp_path / "wandb_run_id").write_text("earlier\n")
    restarted(monkeypatch, tmp_path)
    for mode in ("online", "offline"):
        arguments = ObservabilityArguments(run_dir=tmp_path, use_wandb=True, wandb_mode=mode, wandb_run_id="mine")
        open_trackers(arguments, {}).finish()
    assert [call["id"] for call in init.calls] == ["mine", "mine"]
    assert [call["resume"] for call in init.calls] == ["allow", None]  # offline, wandb would warn that it cannot


def test_trying_again_to_continue_a_run_keeps_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # covers: M12
    init, torn_down = FakeInit.installed(monkeypatch, wandb.errors.CommError("timed out")), []
    monkeypatch.setattr(wandb, "teardown", lambda: torn_down.append(len(init.calls)))
    opened(tmp_path, mode="online", resume=True)
    assert [call["id"] for call in init.calls] == ["mine", "mine"]
    assert torn_down == [1]  # before the second attempt: wandb's process holds the id of the first


def test_a_run_that_went_offline_is_not_continued_online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch, wandb.errors.UsageError("no key"))
    opened(tmp_path, mode="online", resume=True)
    assert init.calls[1]["id"] != "mine"
    assert init.calls[1]["resume"] is None
    assert not (tmp_path / "wandb_run_id").exists()


def test_samples_on_disk_become_tables_at_their_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch)
    tracker = opened(tmp_path, wandb_sample_steps=10)
    tracker.log({"reward/mean": 0.5}, step=10)
    write_samples(tmp_path, "train", 10)  # after the step was logged
    tracker.log({"reward/mean": 0.6}, step=11)
    write_samples(tmp_path, "eval", 11)
    tracker.finish()
    [run] = init.runs
    tables = [(name, row["step"]) for row in run.logged for name in row if name.startswith("samples/")]
    assert tables == [("samples/train", 10), ("samples/eval", 11)]
    [table] = [row["samples/train"] for row in run.logged if "samples/train" in row]
    assert isinstance(table, wandb.Table)
    assert run.finished
