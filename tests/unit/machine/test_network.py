"""Ports, interfaces, services outside and the clock, with servers and sockets of the test."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from types import SimpleNamespace

import pytest
import wandb

from miles_async.machine import network
from miles_async.machine.network import HUB, WANDB, ask, interface_findings, port_findings, service_findings
from miles_async.runtime.network.ports import HeldPort

CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def service() -> Iterator[SimpleNamespace]:
    """A server that answers every request with 404, and whose clock can be wrong."""
    told = SimpleNamespace(ahead=0.0, asked=0, date=None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            told.asked += 1
            self.send_response(404)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return told.date or formatdate(time.time() + told.ahead, usegmt=True)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield told
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_service_that_answers_anything_is_reached(service: SimpleNamespace) -> None:
    reached, clock = service_findings(HUB, {"HF_ENDPOINT": service.url})
    assert (reached.verdict, clock.verdict) == ("ok", "ok")
    assert service.url in reached.found


def test_a_service_whose_date_cannot_be_read_says_nothing_of_the_clock(service: SimpleNamespace) -> None:
    service.date = "today"
    [reached] = service_findings(HUB, {"HF_ENDPOINT": service.url})
    assert reached.verdict == "ok"


def test_a_service_that_speaks_no_http_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as client:
                client.sendall(b"SSH-2.0\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        [finding] = service_findings(HUB, {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"})
        thread.join(10)
    assert finding.verdict == "warning"
    assert "cannot be reached" in finding.found


def test_a_service_that_is_out_of_reach_is_a_warning_with_the_way_round_it() -> None:
    [finding] = service_findings(WANDB, {"WANDB_BASE_URL": CLOSED})
    assert finding.verdict == "warning"
    assert "Connection refused" in finding.found
    assert "--wandb-mode offline" in finding.mend


def test_the_server_that_is_asked_is_the_one_that_wandb_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    assert wandb.Settings().base_url == WANDB.url


def test_a_service_that_is_not_wanted_is_not_asked(service: SimpleNamespace) -> None:
    [finding] = service_findings(HUB, {"HF_ENDPOINT": service.url, "HF_HUB_OFFLINE": "1"})
    assert finding.verdict == "ok"
    for mode in ("offline", "disabled"):
        [finding] = service_findings(WANDB, {"WANDB_BASE_URL": service.url, "WANDB_MODE": mode})
        assert finding.found == f"wandb: not asked (WANDB_MODE={mode})"
    assert not service.asked
    reached, _ = service_findings(WANDB, {"WANDB_BASE_URL": service.url, "WANDB_MODE": "online"})
    assert "answers" in reached.found


def test_a_name_lookup_that_never_ends_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(network, "_ask", lambda url, seconds: release.wait(30))
    reply = ask("http://slow.example", seconds=-0.9)
    release.set()
    assert reply.error == "no answer within -0.9 s"


@pytest.mark.parametrize(("ahead", "words"), [(600, "600 s behind"), (-600, "600 s ahead of")])
def test_a_clock_that_is_wrong_is_told_with_its_side(service: SimpleNamespace, ahead: float, words: str) -> None:
    service.ahead = ahead
    _, clock = service_findings(HUB, {"HF_ENDPOINT": service.url})
    assert clock.verdict == "warning"
    assert clock.found.replace("599", "600").replace("601", "600").startswith(words)
    assert "set-ntp" in clock.mend


def test_a_range_whose_ports_are_taken_is_a_failure() -> None:
    with HeldPort("127.0.0.1") as held:
        [finding] = port_findings(range(held.number, held.number + 1))
        assert finding.verdict == "failure"
        assert f"{held.number}-{held.number}" in finding.found
    [finding] = port_findings(range(held.number, held.number + 1))
    assert finding.verdict == "ok"


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("NCCL_SOCKET_IFNAME", "lo", None),
        ("NCCL_SOCKET_IFNAME", "l", None),  # the beginning of a name
        ("NCCL_SOCKET_IFNAME", "^docker0", None),  # all but these
        ("NCCL_SOCKET_IFNAME", "=l", "l"),
        ("NCCL_SOCKET_IFNAME", "lo,bond7", "bond7"),
        ("GLOO_SOCKET_IFNAME", "l", "l"),
        ("GLOO_SOCKET_IFNAME", "lo", None),
    ],
)
def test_interfaces_that_collectives_are_told_to_use_exist(variable: str, value: str, missing: str | None) -> None:
    findings = list(interface_findings({variable: value}))
    assert [finding.verdict for finding in findings] == (["failure"] if missing else [])
    for finding in findings:
        assert f"no interface {missing}, it has" in finding.found
        assert f"unset {variable}" in finding.mend
