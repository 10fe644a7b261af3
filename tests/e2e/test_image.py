"""The image for CPU: built by buildah, and the quick start in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
@pytest.mark.skipif(
    not all(map(shutil.which, ("buildah", "debootstrap"))), reason="needs: apt-get install buildah debootstrap"
)
def test_the_image_for_cpu_is_made_and_trains(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "scripts/try_image.py", "--folder", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
