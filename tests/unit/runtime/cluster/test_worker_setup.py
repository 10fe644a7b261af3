"""The script that takes the place of Ray's when a worker is set up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray._private.runtime_env.context import RuntimeEnvContext

from miles_async.runtime.cluster import worker_setup

WORKER = "import os, sys; print(sys.argv[1:], os.environ['A'], os.environ['B'])"
CONTEXT = {"env_vars": {"A": "1 2", "B": "${HERE}/b${NOT_HERE}"}, "py_executable": f'{sys.executable} -c "{WORKER}"'}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Output of the script where Ray cannot be imported."""
    own = tmp_path / "ray" / "_private" / "workers" / "setup_worker.py"
    own.parent.mkdir(parents=True)
    own.write_text('import sys; print("Ray\'s own", sys.argv[1:])')
    (tmp_path / "ray" / "__init__.py").write_text("raise SystemExit('Ray was imported')")

    def run(context: Mapping[str, object], *arguments: str) -> str:
        words = [f"--serialized-runtime-env-context={json.dumps(context)}", *arguments]
        command = [sys.executable, worker_setup.__file__, "default_worker.py", "--port=1", *words]
        environment = {"PYTHONPATH": str(tmp_path), "HERE": "/here"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout

    return run


def test_the_worker_has_its_arguments_interpreter_and_variables(run: Callable[..., str]) -> None:
    assert run(CONTEXT, "--language=PYTHON") == "['default_worker.py', '--port=1'] 1 2 /here/b\n"


@pytest.mark.parametrize(
    ("more", "language"),
    [({"command_prefix": ["x &&"]}, "PYTHON"), ({"override_worker_entrypoint": "/x"}, "PYTHON"), ({}, "JAVA")],
)
def test_what_no_run_asks_for_is_left_to_rays_own(
    run: Callable[..., str], more: Mapping[str, object], language: str
) -> None:
    told = run(CONTEXT | more, f"--language={language}")
    assert told.startswith("Ray's own ['default_worker.py', '--port=1', '--serialized-runtime-env-context=")


def test_ray_still_tells_its_script_what_this_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}
    assert json.loads(RuntimeEnvContext().serialize()).keys() == known
    assert Path(worker_setup._rays_own()).is_file()
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", "setup_worker.py")
    worker_setup.install()
    assert Path("/elsewhere", ray_constants.SETUP_WORKER_FILENAME) == Path(worker_setup.__file__)
