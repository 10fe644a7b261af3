"""One W&B run of several processes: one id, one primary, and no run of its own for a secondary that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import stamina
import wandb

from miles_async.arguments import Arguments, ClusterArguments, ObservabilityArguments
from miles_async.observability.trackers import open_trackers
from miles_async.observability.wandb_tracker import report_machine, with_shared_id
from miles_async.runtime.processes.restarts import RESTARTS_VARIABLE
from miles_async.wiring import trainer_process
from tests.unit.observability.test_wandb import FakeInit

SHARED = ObservabilityArguments(use_wandb=True, wandb_shared=True, wandb_mode="online")


@pytest.fixture(autouse=True)
def never_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESTARTS_VARIABLE, raising=False)


def test_processes_of_a_run_share_its_id_and_one_is_primary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = FakeInit.installed(monkeypatch)
    arguments = with_shared_id(replace(SHARED, run_dir=tmp_path / "latest"))
    secondary = report_machine(arguments, "trainer node 0")
    assert secondary is not None
    secondary.finish()
    assert not (tmp_path / "latest" / "wandb_run_id").exists()
    open_trackers(arguments, {}).finish()
    assert (tmp_path / "latest" / "wandb_run_id").exists()
    assert {call["id"] for call in init.calls} == {arguments.wandb_run_id}
    assert {call["mode"] for call in init.calls} == {"shared"}
    seen = [(call["settings"].x_label, call["settings"].x_primary) for call in init.calls]
    assert seen == [("trainer node 0", False), ("driver", True)]
    assert [call["settings"].x_update_finish_state for call in init.calls] == [False, True]


@pytest.mark.parametrize("change", [{"wandb_shared": False}, {"use_wandb": False}, {"wandb_mode": "offline"}])
def test_without_a_server_or_the_flag_nothing_is_shared(change: dict[str, object]) -> None:
    arguments = with_shared_id(replace(SHARED, **change))
    assert arguments.wandb_run_id is None
    assert report_machine(arguments, "trainer node 0") is None


def test_an_id_of_the_flags_is_kept() -> None:
    assert with_shared_id(replace(SHARED, wandb_run_id="mine")).wandb_run_id == "mine"
    assert with_shared_id(SHARED).wandb_run_id != with_shared_id(SHARED).wandb_run_id


def test_a_secondary_that_cannot_be_online_opens_no_run_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # covers: M12
    init = FakeInit.installed(monkeypatch, wandb.errors.UsageError("no key"))
    with stamina.set_testing(True):
        secondary = report_machine(replace(SHARED, run_dir=tmp_path, wandb_run_id="mine"), "trainer node 0")
        assert secondary is not None
        secondary.finish()
    assert [call["mode"] for call in init.calls] == ["shared"]


def test_the_first_rank_of_each_node_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(trainer_process, "report_machine", lambda _, label: labels.append(label))
    arguments = Arguments(cluster=ClusterArguments(actor_num_nodes=2, actor_num_gpus_per_node=4), observability=SHARED)
    for rank in range(8):
        trainer_process.report_node(arguments, rank)
    assert labels == ["trainer node 0", "trainer node 1"]
