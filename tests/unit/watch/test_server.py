"""The server of the page: who may ask, what is answered, and that no request leaves the run directory."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from miles_async.observability.metrics_file import FILE_NAME, MetricsFile, read_metrics
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.runtime.network.keys import Secret
from miles_async.types import EngineReport, EnginesReport
from miles_async.watch.run import Run, open_runs
from miles_async.watch.server import STATIC, VIEWS, make_app
from miles_async.watch.views.logs import MATCHES_OF_EACH
from miles_async.watch.views.overview import idle_share
from tests.fakes.live_run import live_run
from tests.unit.watch.run_files import REASON, STEPS, rewards, write_finished_run
from tests.unit.watch.timeline.trace_files import check_trace, recorded_run

KEY = "read-key"
SAMPLE = {"step": "10", "attempt": "2", "sample": "3"}
PARAMETERS = {view: {"name": "driver.log", "subject": "1", **(SAMPLE if view == "sample" else {})} for view in VIEWS}
FILES = ("ledger.sqlite", "config.toml", "summary.json", "metrics.jsonl", "run.json")
BASE = "http://127.0.0.1:8741"


def client_of(*runs: Run, key: str | None = KEY, write_key: Secret | None = None) -> TestClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return TestClient(make_app(runs, Secret(KEY), write_key), base_url=BASE, headers=headers)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_finished_run(tmp_path / "run")


@pytest.fixture
def client(run_dir: Path) -> Iterator[TestClient]:
    with client_of(*open_runs([run_dir])) as client:
        yield client


def test_data_needs_the_key(run_dir: Path) -> None:
    for key in (None, "", "wrong", KEY + "x"):
        with client_of(*open_runs([run_dir]), key=key) as client:
            for view in VIEWS:
                assert client.get(f"/api/{view}").status_code == 401
            assert client.get(f"/api/runs?key={KEY}").status_code == 401


def test_the_server_imports_at_its_start_what_the_first_list_of_samples_needs() -> None:
    program = """
import sys, time
from miles_async.runtime.network.keys import Secret
from miles_async.watch.server import make_server

assert "pyarrow" not in sys.modules
make_server([], Secret("key"))
while not {"pyarrow.parquet", "pyarrow.compute"} <= sys.modules.keys():
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    for path in ("/", "/api/runs", "/api/overview"):
        assert client.request(method, path).status_code == 405


def writing(run_dir: Path, key: str) -> TestClient:
    return client_of(*open_runs([run_dir]), key=key, write_key=Secret("write-key"))


def test_the_write_key_changes_settings_of_a_live_run(run_dir: Path) -> None:
    with live_run(run_dir) as changes, writing(run_dir, "write-key") as client:
        assert client.get("/api/settings").json() == {"settings": ["lr 1e-06", "generation running"], "over": None}
        answer = client.post("/api/set?run=0", json={"lr": "1e-5"})
        assert (answer.status_code, answer.json()) == (200, {"said": "lr 1e-06 → 1e-5, after step 7"})
        assert changes == [{"lr": "1e-5"}]
        for content in ({"magic": "1"}, {"lr": 1}, ["lr"]):
            assert client.post("/api/set?run=0", json=content).status_code == 400
        assert client.post("/api/set?run=0", json={"magic": "1"}).json() == {"error": "there is no setting magic"}
        assert client.post("/api/set?run=7", json={"lr": "1"}).status_code == 400
        assert len(changes) == 1
        assert {client.get(f"/api/{view}", params=PARAMETERS[view]).status_code for view in VIEWS} == {200}


def test_the_read_key_changes_and_asks_nothing(run_dir: Path) -> None:
    with live_run(run_dir) as changes:
        for key in (KEY, "", "wrong"):
            with writing(run_dir, key) as client:
                assert client.post("/api/set?run=0", json={"lr": "1e-5"}).status_code == 401
        with writing(run_dir, KEY) as client:
            assert client.get("/api/settings").json() is None
        with client_of(*open_runs([run_dir]), key="write-key") as client:  # a server without a write key
            assert client.post("/api/set?run=0", json={"lr": "1e-5"}).status_code == 405
            assert client.get("/api/settings").status_code == 401
    assert changes == []


def test_the_write_key_is_refused_elsewhere_and_to_others(run_dir: Path) -> None:
    with live_run(run_dir) as changes, writing(run_dir, "write-key") as client:
        for path in ("/", "/api/runs", "/api/settings", "/api/set/"):
            assert client.post(path, json={"lr": "1e-5"}).status_code == 405
        for header in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            assert client.post("/api/set?run=0", json={"lr": "1e-5"}, headers=header).status_code == 403
        assert client.post("/api/set?run=0", json={"lr": "1e-5"}, headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/api/set?run=0").status_code == 405
    assert changes == []


def test_settings_of_a_run_that_is_over_say_so(run_dir: Path) -> None:
    with writing(run_dir, "write-key") as client:
        found = client.get("/api/settings").json()
        assert found["settings"] == []
        assert str(run_dir) in found["over"]
        assert client.post("/api/set", json={"lr": "1e-5"}).json() == {"error": found["over"]}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8741", "127.0.0.1.evil.example", "", "127.0.0.1@evil"])
def test_other_names_are_refused(client: TestClient, host: str) -> None:
    """DNS rebinding: a foreign name that resolves to loopback."""
    assert client.get("/api/runs", headers={"Host": host}).status_code == 421
    assert client.get("/", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:9999", "localhost", "localhost:1", "[::1]:80", "127.0.0.1"])
def test_a_forwarded_port_may_have_any_number(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "header", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_other_sites_are_refused(client: TestClient, header: dict[str, str]) -> None:
    assert client.get("/api/runs", headers=header).status_code == 403
    assert client.get("/api/runs", headers={"Origin": BASE, "Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_link_on_another_site_opens_the_page(client: TestClient) -> None:
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status_code == 200


def test_the_page_may_run_its_own_scripts_only(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    assert (
        client.get("/static/main.js").headers["content-type"].startswith(("text/javascript", "application/javascript"))
    )


def test_no_module_parses_html_or_asks_elsewhere() -> None:
    for path in STATIC.rglob("*.js"):
        if "vendor" not in path.parts:
            text = path.read_text()
            for word in "innerHTML outerHTML insertAdjacentHTML document.write eval( http:// https://".split():
                assert word not in text, (path, word)
            assert len(text.splitlines()) < 300


@pytest.mark.parametrize(
    "name", ["../config.toml", "/etc/passwd", "..", ".", "a/../../config.toml", "x\0y", "y" * 5000]
)
def test_a_log_is_one_of_the_run(client: TestClient, name: str) -> None:
    for more in ({}, {"search": "a"}):
        answer = client.get("/api/log", params={"name": name, **more})
        assert answer.status_code == 200
        assert answer.json()["lines"] == []
        assert "missing" in answer.json()


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/"]
)
def test_only_files_of_the_page_are_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code in (404, 405)


def test_a_link_out_of_the_run_directory_is_not_followed(client: TestClient, tmp_path: Path, run_dir: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret line\n")
    (run_dir / "logs" / "link.log").symlink_to(secret)
    assert "link.log" not in [log["name"] for log in client.get("/api/logs").json()]
    assert client.get("/api/log?name=link.log").json()["lines"] == []


def test_the_overview_has_the_numbers_of_the_files(client: TestClient, run_dir: Path) -> None:
    found = client.get("/api/overview?run=0").json()
    assert found["run"]["step"] == found["run"]["steps"] == STEPS
    assert found["run"]["ending"] == "finished"
    rows = read_metrics(run_dir / FILE_NAME)
    assert found["curves"]["reward/mean"]["values"] == [row["reward/mean"] for row in rows if "reward/mean" in row]
    last = [rewards(step) for step in range(STEPS - 4, STEPS + 1)]
    assert found["averaged_steps"] == 5
    assert found["curves"]["averaged"]["values"][-1] == pytest.approx(sum(last) / 5)
    assert found["tiles"]["reward"] == pytest.approx(sum(last) / 5)
    assert found["tiles"]["eval_reward"] == 0.75
    assert found["tiles"]["tokens_per_second"] == 2_000.0
    assert found["tiles"]["trainer_idle"] == 0.25
    assert found["tiles"]["eta_seconds"] is None  # it is over
    assert found["ages"]["ages"] == [0, 1]
    assert [sum(row) for row in found["ages"]["counts"]] == [32.0 * STEPS, 96.0 * STEPS]
    assert found["changes"] == ["after step 20: lr 0.0005 → 0.0004"]
    assert found["groups"]["issued"] == 4
    assert found["groups"]["filtered"] == 2
    assert found["reasons"][0] == {"outcome": "filtered", "reason": REASON, "count": 2}
    (warning,) = found["warnings"]
    assert warning["flags"] == ["--engine-timeout"]
    assert warning["page"] == "docs/engines.md"


def test_the_overview_has_the_bound_that_was_set_last(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/overview").json()["tiles"]["max_weight_staleness"] == "none"  # the flag
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as connection, connection:
        rows = [(step, "max-weight-staleness", "2", value, 3.0) for step, value in ((21, "0"), (22, "3"))]
        connection.executemany("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", rows)
    assert client.get("/api/overview").json()["tiles"]["max_weight_staleness"] == 3


def test_the_version_that_was_last_stepped_from_is_not_that_of_the_weights(client: TestClient, run_dir: Path) -> None:
    file = MetricsFile(run_dir / FILE_NAME)
    file.log({"weight_version/trainer": 39}, step=STEPS + 1)
    file.finish()
    tiles = client.get("/api/overview").json()["tiles"]
    assert (tiles["weight_version"], tiles["stepped_from"]) == (None, 39)
    (run_dir / "summary.json").write_text('{"ending": "finished", "weight_version": 40}')
    assert client.get("/api/overview").json()["tiles"]["weight_version"] == 40


def test_a_run_whose_directory_is_gone_is_not_on_another_machine(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/runs").json()[0]["missing"] is False
    run_dir.rename(run_dir.with_name("elsewhere"))
    (found,) = client.get("/api/runs").json()
    assert (found["state"], found["missing"]) == ("unknown", True)
    assert "host" not in found


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], None),
        ([(5.0, None)], None),
        ([(0.0, 10.0)], 0.0),
        ([(6.0, 8.0), (1.0, 3.0), (0.0, 2.0)], 0.375),
        ([(4.0, 5.0), (0.0, None)], 0.0),  # the first one is still in flight
        ([(0.0, 1.0), (9.0, None), (10.0, None)], 0.8),
    ],
)
def test_idle_time_of_the_rollout_side(spans: list[tuple[float, float | None]], idle: float | None) -> None:
    assert idle_share(spans) == idle


def test_metrics_have_sections_and_meanings(client: TestClient) -> None:
    sections = {each["title"]: each["metrics"] for each in client.get("/api/metrics").json()["sections"]}
    reward = next(entry for entry in sections["Samples"] if entry["name"] == "reward/mean")
    assert (reward["unit"], reward["meaning"]) == ("reward", "mean reward of the batch")
    assert reward["worries"].startswith("falls for tens of steps")
    assert reward["last"] == [rewards(STEPS)]
    assert [entry["name"] for entry in sections["Other"]] == ["my/own"]


def test_a_series_can_be_cut_and_thinned(client: TestClient) -> None:
    found = client.get("/api/series?name=my/own&from=10&to=12").json()["my/own"]
    assert found == {"steps": [10, 11, 12], "values": [10.0, 11.0, 12.0]}
    assert len(client.get("/api/series?name=my/own&points=10").json()["my/own"]["steps"]) <= 10
    assert client.get("/api/series?name=absent").json()["absent"] == {"steps": [], "values": []}


@pytest.mark.parametrize("query", ["run=7", "run=-1", "run=x", "name=a&from=x", "name=a&points=1e9", "run=" + "9" * 30])
def test_wrong_parameters_are_said(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/series?{query}")
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"]


@pytest.mark.parametrize("query", ["run=9", "run=-1", "run=x"])
def test_a_wrong_run_is_said_where_settings_are_read_and_changed(run_dir: Path, query: str) -> None:
    with writing(run_dir, "write-key") as client:
        for answer in (client.get(f"/api/settings?{query}"), client.post(f"/api/set?{query}", json={"lr": "1"})):
            assert answer.status_code == 400
            assert answer.json()["error"].startswith("run: expected")


def test_attempts_tell_their_story(client: TestClient) -> None:
    rows = client.get("/api/attempts").json()["rows"]
    assert [row["attempt"] for row in rows] == [4, 3, 2, 1]
    assert [row["attempt"] for row in client.get("/api/attempts?end=filtered").json()["rows"]] == [2, 1]
    assert [row["attempt"] for row in client.get("/api/attempts?text=equal&before=2").json()["rows"]] == [1]
    (letter,) = client.get("/api/attempts").json()["quarantined"]
    assert letter["reasons"] == ["<b>reward</b> raised"]
    (story,) = client.get("/api/story?subject=1").json()["stories"]
    assert story["lines"][0].endswith("filtered out")
    assert any(REASON in line for line in story["lines"])
    assert "no attempt" in client.get("/api/story?subject=99").json()["missing"]


def test_engines_have_state_starts_and_publications(client: TestClient) -> None:
    found = client.get("/api/engines").json()
    (engine,) = found["engines"]
    assert engine["engine"] == "engine-0"
    assert (engine["state"], engine["starts"], engine["log"]) == ("restarting", 2, "engine-0.1.log")
    assert (engine["kv_use"], engine["running"], engine["waiting"], found["reported"]) == (0.375, 7, 2, 1_100.0)
    assert [lane["name"] for lane in found["lanes"]["lanes"]] == ["trainer", "rank 0", "rank 1", "engine-0"]
    assert found["ranks"] == [{"rank": 0, "log": "trainer-0.log"}]
    assert found["publications"][-1]["phases"] == {"copy": 0.1, "probe": 0.05, "send": 0.3}


def test_flags_are_compared_with_a_run_and_a_preset(tmp_path: Path, run_dir: Path) -> None:
    other = write_finished_run(tmp_path / "other", steps=50)
    with client_of(*open_runs([run_dir, other])) as client:
        found = client.get("/api/flags?run=0&run=1").json()
        assert found["columns"] == ["run", "other"]
        assert [row["flag"] for row in found["flags"] if row["differs"]] == ["--num-rollout"]
        against = client.get("/api/flags?run=0&preset=staleness-2").json()
        bound = next(row for row in against["flags"] if row["flag"] == "--max-weight-staleness")
        assert bound["values"][1] == "2"
        assert not any(row["differs"] for row in against["flags"] if row["values"][-1] is None)


def test_logs_are_paged_and_searched(client: TestClient, run_dir: Path) -> None:
    path = run_dir / "logs" / "long.log"
    path.write_text("".join(f"line {number}\n" for number in range(60_000)))
    last = client.get("/api/log?name=long.log").json()
    assert last["lines"][-1]["text"] == "line 59999"
    earlier = client.get(f"/api/log?name=long.log&before={last['start']}").json()
    assert int(earlier["lines"][-1]["text"].split()[1]) + 1 == int(last["lines"][0]["text"].split()[1])
    found = client.get("/api/log?name=long.log&search=LINE 1234").json()
    assert [line["text"] for line in found["lines"]] == ["line 1234", *(f"line 1234{n}" for n in range(10))]
    assert client.get("/api/log?name=engine-0.0.log").json()["lines"][1]["text"] == "\ufffd\ufffd not UTF-8"
    (run_dir / "logs" / "router.0.log").write_text("\x1b[2m12:00\x1b[0m \x1b[32m INFO\x1b[0m up\n")  # as smg writes it
    assert client.get("/api/log?name=router.0.log").json()["lines"][0]["text"] == "12:00  INFO up"


def test_logs_of_all_processes_are_there_in_groups_and_searched_at_once(client: TestClient, run_dir: Path) -> None:
    names = {
        "driver and rollout": ("driver.log", "rollout-output.log", "stall.txt"),
        "trainer ranks": ("trainer-2.log", "trainer-10.log"),
        "routers": ("router-judge.0.log",),
        "sessions and environments": ("sessions-0.1.log", "agents.log"),
        "engines": ("judge-3.0.log", "engine-0.node1.0.log"),
        "others": ("mine.log",),
    }
    for name in (name for each in names.values() for name in each):
        (run_dir / ("" if name == "stall.txt" else "logs") / name).write_text(f"Trouble in {name}\nnone\n" * 30)
    found = client.get("/api/logs").json()
    for process, expected in names.items():
        listed = [log["name"] for log in found if log["process"] == process]
        assert [name for name in listed if name in expected] == sorted(expected, key=listed.index)
        assert {*expected} <= {*listed}
    ranks = [log["name"] for log in found if log["process"] == "trainer ranks"]
    assert ranks.index("trainer-2.log") < ranks.index("trainer-10.log")
    everywhere = client.get("/api/log?search=trouble IN").json()
    assert {log["name"] for log in everywhere["logs"]} >= {name for each in names.values() for name in each}
    assert everywhere["matches"] == sum(log["matches"] for log in everywhere["logs"])
    of_rank = next(log for log in everywhere["logs"] if log["name"] == "trainer-10.log")
    assert (of_rank["matches"], len(of_rank["lines"])) == (30, MATCHES_OF_EACH)
    assert client.get("/api/log?search=nowhere at all").json() == {"logs": [], "matches": 0}


def test_an_engine_of_any_group_has_its_log_and_its_role(client: TestClient, run_dir: Path) -> None:
    report = EnginesReport(
        time=1.0, engines={"judge-1": EngineReport(state="serving", load=None, pauses=(), role="frozen")}
    )
    (run_dir / "engines.json").write_bytes(msgspec.json.encode(report))
    for name in ("judge-1.0.log", "judge-1.1.log", "sessions-0.0.log", "judge-1.node1.7.log"):
        (run_dir / "logs" / name).write_text("up\n")
    engines = {each["engine"]: each for each in client.get("/api/engines").json()["engines"]}
    assert "sessions-0" not in engines
    judge = engines["judge-1"]
    assert (judge["log"], judge["starts"], judge["role"]) == ("judge-1.1.log", 2, "frozen")


@pytest.mark.parametrize("absent", [*FILES, "logs", "samples", "engines.json", "ranks.json"])
def test_a_directory_opens_with_what_there_is(run_dir: Path, absent: str) -> None:
    path = run_dir / absent
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with client_of(*open_runs([run_dir])) as client:
        for view in VIEWS:
            status = 404 if (absent, view) == ("samples", "sample") else 200
            assert client.get(f"/api/{view}", params=PARAMETERS[view]).status_code == status


def test_a_directory_with_nothing_but_metrics_and_a_ledger_opens(tmp_path: Path) -> None:
    with client_of(*open_runs([recorded_run(tmp_path / "run")])) as client:
        for view in VIEWS.keys() - {"sample"}:
            assert client.get(f"/api/{view}", params=PARAMETERS[view]).status_code == 200, view
        assert client.get("/api/overview").json()["run"]["step"] == 6
        assert client.get("/api/attempts").json()["rows"]


@pytest.mark.parametrize("broken", FILES)
def test_broken_files_are_said_and_do_no_harm(run_dir: Path, broken: str) -> None:
    (run_dir / broken).write_bytes(b"\xff\xfe{[")
    with client_of(*open_runs([run_dir])) as client:
        for view in VIEWS:
            assert client.get(f"/api/{view}", params=PARAMETERS[view]).status_code == 200


def test_texts_of_a_run_arrive_as_they_are(run_dir: Path) -> None:
    texts = ["<script>alert(1)</script>", "\u202etxt.exe", "\x00\x1b[2J", "a" * 100_000]
    lines = [json.dumps({"level": "warning", "timestamp": "", "event": text}) for text in texts]
    (run_dir / "logs" / "driver.log").write_text(
        "".join(f"{line}\n" for line in lines) + r'{"level": "warning", "event": "\ud800"}' + "\n"
    )
    with client_of(*open_runs([run_dir])) as client:
        answer = client.get("/api/overview")
    assert answer.headers["content-type"] == "application/json"
    events = [warning["event"] for warning in answer.json()["warnings"]]
    assert set(texts[:3]) <= set(events)


# ------------------------------------------------------------------------------------------------- files to save
def test_the_timeline_is_made_when_it_is_asked_for(client: TestClient, run_dir: Path) -> None:
    (listed,) = client.get("/api/files?run=0").json()
    assert listed == {"name": "timeline.json.gz", "bytes": None, "changed": None}
    answer = client.get("/api/file?run=0&name=timeline.json.gz")
    assert answer.headers["content-disposition"] == 'attachment; filename="timeline.json.gz"'
    trace = check_trace(gzip.decompress(answer.content))
    assert len(trace.spans("trainer", "steps", "step")) == STEPS
    assert not (run_dir / "timeline.json.gz").exists()


def test_profiles_are_listed_and_saved_as_they_are(client: TestClient, run_dir: Path) -> None:
    content = bytes(range(256))
    (run_dir / "profiles").mkdir()
    (run_dir / "profiles" / "step-2.rank-0.json.gz").write_bytes(content)
    (run_dir / "profiles" / "outside").symlink_to("/etc/hostname")
    _, listed = client.get("/api/files?run=0").json()
    assert (listed["name"], listed["bytes"]) == ("step-2.rank-0.json.gz", 256)
    answer = client.get("/api/file?run=0&name=step-2.rank-0.json.gz")
    assert answer.content == content
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name", ["", "outside", "../config.toml", "config.toml", "..", "/etc/hostname", "a\x00b", "x" * 999]
)
def test_only_profiles_and_the_timeline_can_be_saved(client: TestClient, run_dir: Path, name: str) -> None:
    (run_dir / "profiles").mkdir()
    (run_dir / "profiles" / "outside").symlink_to("/etc/hostname")
    answer = client.get("/api/file", params={"run": "0", "name": name})
    assert answer.status_code == 404
    assert "there is no file" in answer.json()["error"]


def test_files_need_the_key_too(run_dir: Path) -> None:
    with client_of(*open_runs([run_dir]), key=None) as client:
        assert client.get("/api/file?run=0&name=timeline.json.gz").status_code == 401
