"""One run of a (stub) wandb server: a primary and a secondary of the shared mode, and a run that is continued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time, urllib.request
from pathlib import Path
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.wandb_tracker import open_wandb

directory, label, server = sys.argv[1:]
run = TrackedRun(arguments=ObservabilityArguments(run_dir=Path(directory), wandb_shared=True))
tracker = open_wandb(run, "online", "run1", machine=None if label == "driver" else label)
for step in range(3):
    tracker.log({f"{label}/value": step / 10}, step=step)
while f"/l:{label}" not in urllib.request.urlopen(server).read().decode():  # in wandb's metrics of the machine
    time.sleep(0.1)
tracker.finish()
sys.exit(tracker.errors + tracker.dropped)
"""
CONTINUED = """
import sys
from pathlib import Path
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.wandb_tracker import open_wandb

directory, resume = sys.argv[1:]
run = TrackedRun(arguments=ObservabilityArguments(run_dir=Path(directory)))
tracker = open_wandb(run, "online", "run1", resume=resume == "resume")
tracker.log({f"{resume}/value": 0.5}, step=1)
tracker.finish()
sys.exit(tracker.errors + tracker.dropped)
"""
RUN = {
    "id": "1",
    "name": "run1",
    "displayName": "run1",
    "historyLineCount": 0,
    "historyTail": "[]",
    "eventsTail": "[]",
    "logLineCount": 0,
    "eventsLineCount": 0,
    "tags": [],
    "project": {"id": "1", "name": "miles_async", "entity": {"id": "1", "name": "someone"}},
}
ANSWER = {
    "viewer": {"id": "1", "username": "someone", "entity": "someone", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {"max_cli_version": "99"}, "features": []},
    "upsertBucket": {"bucket": RUN, "inserted": True},
    "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
}


class StubServer(ThreadingHTTPServer):
    """Answers every GraphQL operation with the least that wandb needs; keeps what was streamed to runs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.streamed: list[tuple[str, str]] = []  # (path, body)


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/file_stream"):
            self.server.streamed.append((self.path, body.decode()))
        answer = {"data": ANSWER} if self.path == "/graphql" else {}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(body for _, body in self.server.streamed).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_primary_and_secondary_reach_the_same_run_under_their_own_labels(server: StubServer, tmp_path: Path) -> None:
    # covers: M12
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {
        **os.environ,
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,  # the form of a key; nobody checks it
        "WANDB__STATS_SAMPLING_INTERVAL": "0.1",  # seconds, as the next one
        "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "0.5",
    }
    for label in ("driver", "worker"):
        command = [sys.executable, "-c", WRITER, str(tmp_path / label), label, url]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=80)
    assert {path for path, _ in server.streamed} == {"/files/someone/miles_async/run1/file_stream"}
    bodies = "".join(body for _, body in server.streamed)
    for label in ("driver", "worker"):
        assert f"{label}/value" in bodies
        assert f"/l:{label}" in bodies


def test_a_run_that_is_continued_logs_to_the_same_run(server: StubServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    for resume in ("first", "resume"):
        command = [sys.executable, "-c", CONTINUED, str(tmp_path / resume), resume]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=80)
        assert (tmp_path / resume / "wandb_run_id").read_text() == "run1\n"  # it did not go offline
    assert {path for path, _ in server.streamed} == {"/files/someone/miles_async/run1/file_stream"}
    bodies = "".join(body for _, body in server.streamed)
    assert "first/value" in bodies
    assert "resume/value" in bodies
