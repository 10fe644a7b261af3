"""Settings of all tests: Hypothesis, threads, signals, garbage collection, logging."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

engine.MAX_SHRINKING_SECONDS = 30  # instead of 300: a test that is stopped at its time limit shows no example
# A loaded machine is slow, which is no failure.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")

# Before torch is imported: there are more workers than cores, and threads that wait for one another burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # as in runs: nothing uses these workers
# Set when a test imports MLflow or Gymnasium. Runs are forked from processes that imported in this environment.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "hide")
# A shell starts what runs in the background (`make test &`) deaf to Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # nearly all that collecting tests imports stays, and looking through it takes seconds


def pytest_collection_finish() -> None:
    """Tests begin: look for garbage again, but not among what was there before them."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """The process logs afterwards as it did before."""
    import structlog  # here, since some tests of tests/gpu run without it

    from miles_async.observability.logs import close_logging

    before = logging.getLogger().level
    yield
    close_logging()
    logging.getLogger().setLevel(before)
    logging.captureWarnings(False)
    structlog.reset_defaults()
