"""Each tracker's own library with a server that is dead, one that never answers, and a full disk: no run notices.

`make test-extras` has the libraries that `make test` lacks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from tests.integration.tracked_process import FINISH_SECONDS, STEPS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ("unshare", "--map-root-user", "--mount")
MOUNT = 'mkdir -p "$0" && mount -t tmpfs -o size=2m none "$0" && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tracker, its flags and environment with a server, {url}, and with a directory, {disk}."""

    package: str
    served: Sequence[str] = ()
    server: Mapping[str, str] = field(default_factory=dict)
    stored: Sequence[str] = ()
    disk: Mapping[str, str] = field(default_factory=dict)
    folder: str  # in the run directory


CASES = {
    "wandb": Case(
        package="wandb",
        served=("--wandb-mode", "online"),
        server={"WANDB_BASE_URL": "{url}", "WANDB_API_KEY": "0" * 40},
        stored=("--wandb-mode", "offline"),
        folder="wandb",
    ),
    "tensorboard": Case(package="tensorboard", folder="tensorboard"),
    "mlflow": Case(
        package="mlflow",
        served=("--mlflow-tracking-uri", "{url}"),
        stored=("--mlflow-tracking-uri", "file://{disk}"),
        disk={"MLFLOW_ALLOW_FILE_STORE": "true"},
        folder="store",
    ),
    "trackio": Case(
        package="trackio",
        served=("--trackio-space-id", "someone/runs"),
        server={"HF_ENDPOINT": "{url}", "HF_TOKEN": "hf_none"},
        disk={"TRACKIO_DIR": "{disk}", "HF_HUB_OFFLINE": "1"},
        folder="db",
    ),
    "swanlab": Case(
        package="swanlab",
        served=("--swanlab-mode", "online"),
        server={"SWANLAB_API_HOST": "{url}", "SWANLAB_WEB_HOST": "{url}", "SWANLAB_API_KEY": "0" * 21},
        stored=("--swanlab-mode", "offline"),
        folder="swanlog",
    ),
}


@pytest.fixture(params=CASES)
def tracker(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(CASES[name].package) is None:
        pytest.skip(f"the extra {name} is not installed: `make test-extras`")
    return name


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def track(run_dir: Path, tracker: str, words: Sequence[str], named: Mapping[str, str], disk: Path | None) -> None:
    """Log STEPS steps in a process, which must neither wait for the tracker nor fail."""
    command = [sys.executable, "-m", "tests.integration.tracked_process", str(disk or ""), str(run_dir)]
    inside = [*NAMESPACE, "sh", "-c", MOUNT, str(disk)] if disk else []
    done = subprocess.run(
        [*inside, *command, f"--use-{tracker}", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(run_dir.parent), **named},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    waited = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert waited["log"] < 5
    assert waited["finish"] < FINISH_SECONDS + 30  # wandb by itself waits for minutes
    assert len(read_metrics(run_dir / FILE_NAME)) == STEPS


@pytest.mark.parametrize("server", ["dead", "slow"])
def test_a_server_that_does_not_answer_holds_up_no_run(tmp_path: Path, tracker: str, server: str, silent: str) -> None:
    # covers: M12
    case = CASES[tracker]
    if not case.served:
        pytest.skip("it has no server")
    url = "http://127.0.0.1:9" if server == "dead" else silent
    named = {name: value.format(url=url) for name, value in case.server.items()}
    track(tmp_path / "run", tracker, [word.format(url=url) for word in case.served], named, None)


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="a disk of 2 MB is mounted in a namespace, which this machine does not allow",
)
def test_a_full_disk_holds_up_no_run(tmp_path: Path, tracker: str) -> None:
    # covers: M12
    case, disk = CASES[tracker], tmp_path / "run" / CASES[tracker].folder
    named = {name: value.format(disk=disk) for name, value in case.disk.items()}
    track(tmp_path / "run", tracker, [word.format(disk=disk) for word in case.stored], named, disk)
