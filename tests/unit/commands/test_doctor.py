"""``miles-async doctor``: findings with their remedies, and an exit status that scripts can use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.cli import main
from miles_async.commands import doctor
from miles_async.errors import ConfigurationError
from miles_async.machine.finding import Finding
from miles_async.observability import wandb_tracker
from miles_async.runs import checks
from miles_async.runs.checks import check_surroundings, machine_state
from miles_async.runtime import device
from miles_async.runtime.device import count_gpus
from tests.unit.commands.command_line import printed

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "assets" / "reverse" / "model"
CLOSED = "http://127.0.0.1:9"
FULL = Finding(check="disk", verdict="failure", found="/runs has no room", mend="du -xhd1 /runs")
SLOW = Finding(check="shared memory", verdict="warning", found="/dev/shm is small", mend="mount -o remount /dev/shm")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_ENDPOINT", "WANDB_BASE_URL"):
        monkeypatch.setenv(variable, CLOSED)
    for variable in ("RAY_ADDRESS", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)


def test_this_machine_can_run_and_warnings_do_not_change_that(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "doctor", "--device", "cpu", "--hf-checkpoint", str(MODEL))
    for check in ("packages", "GPUs", "shared memory", "disk", "processes", "ports", "sandbox", "model"):
        assert f" {check} " in shown
    assert f"  warning  network        wandb: {CLOSED} cannot be reached" in shown
    assert " mend: export WANDB_BASE_URL=" in shown
    assert shown.endswith(" 0 failure\n")


def test_a_failure_is_told_with_its_remedy_and_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    for shard in model.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-100])
    assert main(["doctor", "--device", "cpu", "--hf-checkpoint", str(model)]) == 1
    shown = capsys.readouterr().out
    assert f"  failure  model          --hf-checkpoint {model}: " in shown
    assert f" mend: hf download <model> --local-dir {model}" in shown


def test_a_torch_that_cannot_be_imported_is_told_with_the_other_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def count() -> int:
        raise ImportError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(device, "count_gpus", count)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "  failure  torch          cannot be imported: libcudnn.so.9: cannot open shared object file\n" in shown
    assert " mend: make setup\n" in shown
    assert " sandbox " in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clutser"], "unrecognized arguments: --clutser"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--port-range", "9-1"], "--port-range 9-1: expected LOW-HIGH"),
        (["--cluster"], "--cluster without a cluster: give --ray-address, or set RAY_ADDRESS"),
        (["--ray-address", "10.0.0.1:6379"], "--ray-address without --cluster"),
        (["--cluster", "--ray-address", "127.0.0.1:9"], "nothing answers there"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


def test_a_run_makes_the_same_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is refused, a warning is a note."""
    monkeypatch.setattr(checks, "machine_state", lambda arguments: [FULL, SLOW])
    with pytest.raises(ConfigurationError, match="disk: /runs has no room; du -xhd1 /runs"):
        check_surroundings(Arguments())
    monkeypatch.setattr(checks, "machine_state", lambda arguments: [SLOW])
    assert check_surroundings(Arguments()) == ["shared memory: /dev/shm is small; mount -o remount /dev/shm"]


def _verdicts(**flags: object) -> dict[str, str]:
    arguments = Arguments(cluster=ClusterArguments(device="cpu"), observability=ObservabilityArguments(**flags))
    return {finding.check: finding.verdict for finding in machine_state(arguments)}


def test_a_run_asks_for_wandb_only_if_it_logs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb_tracker, "login_problem", lambda: None)
    assert _verdicts(use_wandb=True)["network"] == "warning"
    assert "network" not in _verdicts(use_wandb=True, wandb_mode="offline")
    assert "network" not in _verdicts(wandb_mode="online")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "network" not in _verdicts(use_wandb=True)


def test_a_run_that_cannot_log_to_wandb_as_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_tracker, "login_problem", lambda: "there is no API key")
    monkeypatch.setenv("WANDB_MODE", "offlin")
    assert _verdicts(use_wandb=True)["wandb"] == "failure"
    monkeypatch.delenv("WANDB_MODE")
    assert _verdicts(use_wandb=True)["wandb"] == "failure"
    assert "wandb" not in _verdicts(use_wandb=True, wandb_mode="offline")


def test_the_machine_of_a_run_on_a_cluster_needs_no_gpu() -> None:
    """Those of other nodes are meant."""

    def failures(address: str | None) -> set[str]:
        arguments = Arguments(cluster=ClusterArguments(device="cuda", ray_address=address))
        return {found.check for found in machine_state(arguments) if found.verdict == "failure"}

    if count_gpus() == 0:
        assert "GPUs" in failures(None)
    assert "GPUs" not in failures("10.0.0.1:6379")


def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert doctor._EPILOG.split(":")[0] in capsys.readouterr().out
