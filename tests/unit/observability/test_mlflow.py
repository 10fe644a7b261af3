"""MLflow's own store has what was logged, after a restart, too; one that cannot be used costs a run nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability.mlflow_tracker import MlflowTracker, mlflow_name, tracking_uri
from miles_async.observability.tracker_parts import Settings, TrackedRun
from miles_async.observability.trackers import open_trackers
from tests.unit.observability.tracked import require_that_metrics_are_written, restarted

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

tracking = pytest.importorskip("mlflow.tracking", reason="the extra mlflow is not installed")


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store that the client has by itself
    return (tmp_path / "store").as_uri()


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return tracking.MlflowClient(tracking_uri=uri)


def opened(folder: Path, uri: str, settings: Settings | None = None) -> MlflowTracker:
    (folder / "latest").mkdir(exist_ok=True)
    arguments = ObservabilityArguments(run_dir=folder / "latest", mlflow_experiment_name="mine")
    return MlflowTracker(TrackedRun(arguments=arguments, settings=settings or {}), uri, None)


def runs(client: MlflowClient) -> list[tuple[str, str, str]]:
    """(id, name, status) of all runs of the experiment."""
    experiment = client.get_experiment_by_name("mine")
    found = client.search_runs([experiment.experiment_id])
    return [(run.info.run_id, run.info.run_name, run.info.status) for run in found]


def history(client: MlflowClient, run_id: str, metric: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, metric))


def test_every_metric_is_a_curve_over_steps(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    tracker = opened(tmp_path, uri, {"optimizer": {"lr": 1e-6}, "model": {"name": "x" * 9000}})
    tracker.log({"reward/mean": 0.25, "eval/gsm8k/pass@4": 0.5, "age/count/0": 96}, step=1)
    tracker.log({"reward/mean": 0.5, **{f"my/{n}": float(n) for n in range(1500)}}, step=2)
    [(run_id, name, status)] = runs(client)
    assert (name, status) == ("latest", "RUNNING")
    tracker.finish()
    assert history(client, run_id, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert history(client, run_id, "eval/gsm8k/pass_4") == [(1, 0.5)]
    assert history(client, run_id, "my/1499") == [(2, 1499.0)]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "1e-06"


def test_what_is_not_a_number_is_logged(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    tracker = opened(tmp_path, uri)
    tracker.log({"train/loss": float("nan"), "train/grad_norm": float("inf"), "reward/mean": 0.5}, step=1)
    [(run_id, _, _)] = runs(client)
    assert history(client, run_id, "reward/mean") == [(1, 0.5)]
    assert client.get_metric_history(run_id, "train/loss")


def test_a_restarted_run_continues_its_run(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ObservabilityArguments(
        run_dir=tmp_path / "latest", use_mlflow=True, mlflow_tracking_uri=uri, mlflow_experiment_name="mine"
    )
    for step in (1, 2):
        trackers = open_trackers(arguments, {"optimizer": {"lr": step}})  # a flag may differ
        trackers.log({"reward/mean": step / 10}, step=step)
        trackers.finish()
        aside = (tmp_path / "latest").rename(tmp_path / f"latest.{step}")
        restarted(monkeypatch, aside)
    [(run_id, _, status)] = runs(client)
    assert status == "FINISHED"
    assert history(client, run_id, "reward/mean") == [(1, 0.1), (2, 0.2)]


def test_a_store_that_cannot_be_used_costs_a_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "file").touch()
    place = (tmp_path / "file").as_uri()
    arguments = ObservabilityArguments(run_dir=tmp_path / "run", use_mlflow=True, mlflow_tracking_uri=place)
    require_that_metrics_are_written(arguments)


def test_the_server_is_that_of_flag_or_variable() -> None:
    flagged = ObservabilityArguments(use_mlflow=True, mlflow_tracking_uri="http://a")
    assert tracking_uri(flagged, {"MLFLOW_TRACKING_URI": "http://b"}) == "http://a"
    unflagged = ObservabilityArguments(use_mlflow=True)
    assert tracking_uri(unflagged, {"MLFLOW_TRACKING_URI": "http://b"}) == "http://b"
    with pytest.raises(ConfigurationError, match="--use-mlflow: expected --mlflow-tracking-uri or MLFLOW_TRACKING_URI"):
        tracking_uri(unflagged, {})


def test_names_have_the_characters_that_mlflow_allows() -> None:
    assert mlflow_name("train/logprob_diff/age_16+/p99") == "train/logprob_diff/age_16_/p99"
