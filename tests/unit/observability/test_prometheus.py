"""A run's metrics as Prometheus reads them: names, meanings, the key, TLS; and what must not hold up the run."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability import prometheus_tracker
from miles_async.observability.prometheus_tracker import PrometheusTracker, metrics_key
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.trackers import open_trackers
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.keys import METRICS_KEY_VARIABLE, Secret
from miles_async.runtime.network.ports import HeldPort
from tests.fakes.certificates import Authority, needs_openssl
from tests.unit.observability.tracked import require_that_metrics_are_written

KEY = Secret("k" * 64)
ARGUMENTS = ObservabilityArguments(run_dir=Path("runs/qwen3-4b"), prometheus_port=0)  # any free one


@pytest.fixture
def tracker() -> Iterator[PrometheusTracker]:
    opened = PrometheusTracker(TrackedRun(arguments=ARGUMENTS), KEY, clock=lambda: 1766000000.0)
    yield opened
    opened.finish()


def get(port: int, path: str = "/metrics", key: Secret | None = KEY, **headers: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={**headers, **(key.headers() if key else {})}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def scraped(port: int) -> dict[str, float]:
    """Metric → its value, as Prometheus' own parser finds it."""
    families = text_string_to_metric_families(get(port))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} <= {"qwen3-4b"}
    return {f"{sample.name} {sample.labels['metric']}": sample.value for sample in samples}


def test_every_metric_has_its_latest_value(tracker: PrometheusTracker) -> None:
    tracker.log({"reward/mean": 0.25, "age/count/0": 96}, step=1)
    tracker.log({"reward/mean": 0.5}, step=2)
    tracker.log({"eval/gsm8k/pass@4": 0.75}, step=2)
    assert scraped(tracker.port) == {
        "miles_async_reward_mean reward/mean": 0.5,
        "miles_async_age_count_0 age/count/0": 96,
        "miles_async_eval_gsm8k_pass_4 eval/gsm8k/pass@4": 0.75,
        "miles_async_step step": 2,
        "miles_async_last_step_timestamp_seconds last_step_timestamp_seconds": 1766000000.0,
    }


def test_an_evaluation_or_a_checkpoint_is_no_step(tracker: PrometheusTracker) -> None:
    tracker.log({"eval/reward": 0.5}, step=0)
    tracker.log({"checkpoint/write_seconds": 2.0}, step=4)
    assert "miles_async_step step" not in scraped(tracker.port)


def test_help_is_the_meaning_in_the_registry(tracker: PrometheusTracker) -> None:
    tracker.log({"reward/mean": 0.25, "mine/own": 1.0}, step=1)
    text = get(tracker.port)
    assert "# HELP miles_async_reward_mean mean reward of the batch (reward); look closer when: falls" in text
    assert "# TYPE miles_async_reward_mean gauge\n" in text
    assert "# HELP miles_async_mine_own \n" in text
    assert "# EOF" in get(tracker.port, Accept="application/openmetrics-text; version=1.0.0")


def test_two_metrics_with_one_name_in_prometheus_stay_apart(tracker: PrometheusTracker) -> None:
    tracker.log({"a/b_c": 1.0, "a/b/c": 2.0}, step=1)
    assert get(tracker.port).count("# TYPE miles_async_a_b_c gauge") == 1
    found = scraped(tracker.port)
    assert (found["miles_async_a_b_c a/b_c"], found["miles_async_a_b_c a/b/c"]) == (1.0, 2.0)


@pytest.mark.parametrize("key", [None, Secret("k" * 63)])
def test_nothing_is_told_without_the_key(tracker: PrometheusTracker, key: Secret | None) -> None:
    tracker.log({"reward/mean": 0.25}, step=1)
    for path in ("/metrics", "/"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(tracker.port, path, key)
        assert refused.value.code == 401
        assert b"reward" not in refused.value.read()
        assert "Python" not in str(refused.value.headers)
        refused.value.close()


def test_there_is_nothing_but_metrics(tracker: PrometheusTracker) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        get(tracker.port, "/other")
    refused.value.close()


def test_a_run_without_a_key_is_refused() -> None:
    assert metrics_key({METRICS_KEY_VARIABLE: "secret"}).matches("secret")
    for environment in ({}, {METRICS_KEY_VARIABLE: ""}):
        with pytest.raises(ConfigurationError, match=rf"--use-prometheus: .*export {METRICS_KEY_VARIABLE}="):
            metrics_key(environment)


def test_silent_clients_hold_up_neither_others_nor_the_end(
    tracker: PrometheusTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: M12
    monkeypatch.setattr(prometheus_tracker._Handler, "timeout", None)  # who waits for one of them waits forever
    silent = [socket.create_connection(("127.0.0.1", tracker.port)) for _ in range(20)]
    tracker.log({"reward/mean": 0.5}, step=1)
    assert scraped(tracker.port)["miles_async_reward_mean reward/mean"] == 0.5
    tracker.finish()
    for connection in silent:
        connection.close()


@needs_openssl
def test_with_certificates_the_port_speaks_tls_alone(tmp_path: Path) -> None:
    tls = Authority.make(tmp_path).issue("127.0.0.1")
    tracker = PrometheusTracker(TrackedRun(arguments=ARGUMENTS, network=Network(tls=tls)), KEY)
    tracker.log({"reward/mean": 0.5}, step=1)
    silent = socket.create_connection(("127.0.0.1", tracker.port))  # without a handshake
    request = urllib.request.Request(f"https://127.0.0.1:{tracker.port}/metrics", headers=KEY.headers())
    with urllib.request.urlopen(request, timeout=10, context=tls.client()) as answer:
        assert b"miles_async_reward_mean" in answer.read()
    with pytest.raises(OSError, match=r"reset|closed|disconnected"):
        get(tracker.port)
    silent.close()
    tracker.finish()


def test_a_port_in_use_costs_a_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    monkeypatch.setenv(METRICS_KEY_VARIABLE, KEY.reveal())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ObservabilityArguments(run_dir=tmp_path, use_prometheus=True, prometheus_port=port)
        require_that_metrics_are_written(arguments)


@pytest.mark.parametrize(("flag", "label"), [(None, "latest"), ("mine", "mine")])
def test_runs_are_told_apart_by_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str | None, label: str
) -> None:
    monkeypatch.setenv(METRICS_KEY_VARIABLE, KEY.reveal())
    with HeldPort("127.0.0.1") as free:
        port = free.number
    arguments = ObservabilityArguments(
        run_dir=tmp_path / "latest", use_prometheus=True, prometheus_port=port, prometheus_run_name=flag
    )
    trackers = open_trackers(arguments, {})
    trackers.log({"reward/mean": 0.5}, step=1)
    assert f'miles_async_step{{metric="step",run="{label}"}} 1.0' in _until_served(port, "miles_async_step{")
    trackers.finish()
    with pytest.raises(urllib.error.URLError):
        get(port)


def _until_served(port: int, text: str) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if text in (served := get(port)):
                return served
        except urllib.error.URLError:  # the port is opened in the tracker's thread
            pass
        time.sleep(0.02)
    raise AssertionError(f"nothing served {text}")
