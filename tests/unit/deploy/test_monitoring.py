"""deploy/monitoring: Prometheus scrapes what a run serves, and Grafana draws metrics that exist."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import yaml

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.metric_names import names_in, sections
from miles_async.observability.prometheus_tracker import PATH, PREFIX, prometheus_name
from miles_async.runtime.network.keys import METRICS_KEY_VARIABLE
from tests.json_dict import JsonDict

FOLDER = Path(__file__).parents[3] / "deploy" / "monitoring"
COMPOSE: JsonDict = yaml.safe_load((FOLDER / "docker-compose.yaml").read_text())
SCRAPES: JsonDict = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
[DASHBOARD] = (json.loads(path.read_text()) for path in FOLDER.glob("dashboards/*.json"))
SOURCES = sorted(FOLDER.glob("provisioning/datasources/*.yaml"))

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
OURS = sorted({name for query in QUERIES for name in re.findall(rf"{PREFIX}\w+", query)})
ENGINES = sorted({name for query in QUERIES for name in re.findall(r"sglang\[:_\](\w+)", query)})


def test_the_compose_file_has_the_names_and_types_of_compose() -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(schema.read_text()))


def test_what_is_mounted_exists() -> None:
    mounted = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]]
    assert not [path for path in mounted if path not in COMPOSE["volumes"] and not (FOLDER / path).exists()]
    assert COMPOSE["secrets"]["metrics_key"]["environment"] == METRICS_KEY_VARIABLE


def test_nothing_listens_outside_of_the_machine() -> None:
    services = COMPOSE["services"]
    assert all(service["network_mode"] == "host" for service in services.values())
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_prometheus_scrapes_the_default_port_with_the_key() -> None:
    run, engines = SCRAPES["scrape_configs"]
    assert run["static_configs"] == [{"targets": [f"127.0.0.1:{ObservabilityArguments().prometheus_port}"]}]
    assert run.get("metrics_path", "/metrics") == PATH
    assert run["authorization"]["credentials_file"] == f"/run/secrets/{COMPOSE['services']['prometheus']['secrets'][0]}"
    assert {f'job="{engines["job_name"]}"'} == {word for query in QUERIES for word in re.findall(r'job="\w+"', query)}


def test_the_dashboard_asks_the_source_that_is_set_up() -> None:
    sources = {source["uid"] for path in SOURCES for source in yaml.safe_load(path.read_text())["datasources"]}
    used = {panel["datasource"]["uid"] for panel in PANELS}
    used |= {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == sources == {DASHBOARD["templating"]["list"][0]["datasource"]["uid"]}


@pytest.mark.parametrize("name", OURS)
def test_metrics_of_runs_are_in_the_registry(name: str) -> None:
    rows = [row for section in sections() for row in section.rows]
    known = {prometheus_name(metric) for row in rows for metric in names_in(row.names)}
    assert name in known | {f"{PREFIX}step", f"{PREFIX}last_step_timestamp_seconds"}


@pytest.mark.parametrize("name", ENGINES)
def test_metrics_of_engines_are_sglangs(name: str) -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    collector = Path(spec.origin).parent / "srt" / "observability" / "metrics_collector.py"
    assert f'name="sglang:{name}"' in collector.read_text()


def test_panels_do_not_overlap() -> None:
    taken = [
        (column, line)
        for panel in DASHBOARD["panels"]
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(column for column, _ in taken) < 24
