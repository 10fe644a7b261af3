"""Becomes a Ray worker in its runtime environment, as Ray's ``setup_worker.py`` (2.60) does, but without importing Ray.

Importing Ray takes half a second of CPU for every worker. A run's own Ray is started with this script in place of
Ray's (:func:`install`). Containers and other languages, which no run asks for, are left to Ray's script.
Standard library only.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import split


def install() -> None:
    """Make Ray, if this process starts it from now on, set workers up with this script."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = __file__  # Ray joins it to its own directory: an absolute path stays


def main(arguments: Sequence[str]) -> None:
    """``arguments``: of Ray's script, and of the worker."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    ours, workers = parser.parse_known_args(arguments)
    context = json.loads(ours.serialized_runtime_env_context)
    if ours.language != "PYTHON" or context.get("command_prefix") or context.get("override_worker_entrypoint"):
        os.execv(sys.executable, [sys.executable, _rays_own(), *arguments])
    for name, text in context.get("env_vars", {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(text))
    command = [*split(context.get("py_executable") or sys.executable), *workers]
    os.execvp(command[0], command)


def _rays_own() -> str:
    found = importlib.util.find_spec("ray")  # which imports nothing
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py")


if __name__ == "__main__":
    main(sys.argv[1:])
