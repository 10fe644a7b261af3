"""Importing before anything else, and what becomes of it when the run never starts."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil
import pytest

from miles_async.arguments.parser import assemble
from miles_async.errors import ConfigurationError
from miles_async.runtime.processes.run_process import MARK
from miles_async.wiring import early_imports as early
from tests.unit.runtime.processes.waiting import environment_of

CPU = assemble({"device": "cpu"}, {})


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "")  # restored at the end: this process is no run
    monkeypatch.setattr(early, "COMMON", ("json",))


def test_a_run_that_is_refused_leaves_no_process() -> None:
    # covers: C10
    with suppress(ConfigurationError), early.early_imports(CPU) as servers:
        process = psutil.Process(servers.pid)
        assert process.is_running()
        raise ConfigurationError("the model is of another family")
    assert not process.is_running()


def test_what_it_starts_is_marked_as_the_runs() -> None:
    with early.early_imports(CPU) as servers:
        assert len(os.environ[MARK]) == 32
        environment = environment_of(psutil.Process(servers.pid))
    assert environment[MARK] == os.environ[MARK]
    assert "OMP_NUM_THREADS" in environment  # one thread per process on a CPU
