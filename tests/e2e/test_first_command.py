"""The README's first command on a machine that nobody prepared: a clean clone, pip's defaults, an empty HOME."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED_GIB = 16  # a CUDA build of torch with its libraries, if PyTorch's index of CPU builds is out of reach
OF_PIP = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "VIRTUAL_ENV", "PYTHONPATH")


@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_the_quick_start_learns_where_nothing_is_set(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / 2**30
    if free < NEEDED_GIB:
        pytest.skip(f"{free:.0f} GiB are free at {tmp_path}, and a CUDA build of torch may need {NEEDED_GIB}")
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {name: value for name, value in os.environ.items() if name not in OF_PIP}
    environment = kept | {"HOME": str(home), "PIP_CONFIG_FILE": os.devnull}
    try:
        for times in (1, 2):  # the second finds the environment made, with the libraries that its torch needs
            done = subprocess.run(["make", "quickstart"], cwd=clone, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            assert ("set-up:" in done.stdout) is (times == 1)
            (path,) = clone.glob("runs/quickstart/summary.json")
            summary = json.loads(path.read_text())
            assert summary["eval_reward_last"] > 0.8 > 0.5 > summary["eval_reward_first"]
            assert summary["balanced"]
            (report,) = clone.glob("runs/quickstart/report.html")
            assert f"wrote {report.relative_to(clone)}" in done.stdout
    finally:
        shutil.rmtree(clone, ignore_errors=True)
