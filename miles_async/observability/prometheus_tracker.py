"""Prometheus: the latest value of every metric at ``/metrics``, on a port that opens with a key only.

A name like ``reward/mean`` becomes ``miles_async_reward_mean``; its label ``metric`` is the name in the registry,
and its label ``run`` distinguishes runs. HELP comes from the registry of metrics.
"""

from __future__ import annotations

import os
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from miles_async.errors import ConfigurationError
from miles_async.observability.metric_names import describe
from miles_async.observability.metrics_file import kind_of
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.runtime.network.keys import METRICS_KEY_VARIABLE, Secret
from miles_async.runtime.network.tls import Tls

PATH = "/metrics"
PREFIX = "miles_async_"
_REQUEST_SECONDS = 10.0  # for a client to send its request
_POLL_SECONDS = 0.1  # that closing the port may wait
_STEP, _TIME = "step", "last_step_timestamp_seconds"
_HELP: Mapping[str, str] = {_STEP: "steps trained", _TIME: "when the last step was recorded, in seconds since 1970"}


def metrics_key(environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the key that opens the port. Raises ConfigurationError without one: no port is open to all."""
    if not (key := environment.get(METRICS_KEY_VARIABLE)):
        raise ConfigurationError(
            f"--use-prometheus: expected the key that Prometheus will send in {METRICS_KEY_VARIABLE}, found none: "
            f"export {METRICS_KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    return Secret(key)


class PrometheusTracker(Collector):
    """The Tracker itself. Separate threads answer scrapes, with the latest values that :meth:`log` received."""

    def __init__(self, run: TrackedRun, key: Secret, *, clock: Callable[[], float] = time.time) -> None:
        """Open the port, which ``key`` opens to clients. Raises OSError."""
        arguments, network = run.arguments, run.network
        self._run = arguments.prometheus_run_name or arguments.run_dir.name
        self._clock = clock
        self._latest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._server = _Server((network.entrance(), arguments.prometheus_port), key, network.tls, self)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="prometheus", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        with self._lock:
            self._latest.update(metrics)
            if kind_of(metrics) == "step":
                self._latest |= {_STEP: step, _TIME: self._clock()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the latest values; called for each scrape."""
        with self._lock:
            latest = dict(self._latest)
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in latest.items():
            name = prometheus_name(metric)
            if name not in families:
                families[name] = GaugeMetricFamily(name, _HELP.get(metric) or _help(metric), labels=("run", "metric"))
            families[name].add_metric((self._run, metric), value)
        yield from families.values()

    def finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus_name(metric: str) -> str:
    """The name of a metric in Prometheus.

    >>> prometheus_name("train/logprob_diff/age_8-15/p99")
    'miles_async_train_logprob_diff_age_8_15_p99'
    """
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _help(metric: str) -> str:
    """Meaning, unit, and when to look closer, as the registry has them; empty for a metric that it lacks."""
    found = describe(metric)
    worries = f"; look closer when: {found.worries}" if found.worries else ""
    return f"{found.meaning} ({found.unit}){worries}" if found.meaning else ""


class _Server(socketserver.ThreadingTCPServer):
    """One thread per request. Not HTTPServer, which asks DNS for its own name."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], key: Secret, tls: Tls | None, metrics: Collector) -> None:
        self.key = key
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(metrics)
        super().__init__(address, _Handler)
        if tls is not None:  # the handshake is the request's thread's: a silent client holds up no other
            self.socket = tls.server().wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that break off."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if not self.server.key.opens_for(self.headers.get("Authorization")):
            self._answer(401, "text/plain", f"expected the key in {METRICS_KEY_VARIABLE} as a bearer token\n".encode())
        elif self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain", f"expected {PATH}\n".encode())
        else:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.registry))

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response_only(status)  # without the version of Python
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log no requests."""
