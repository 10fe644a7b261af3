"""A short ladder of ``make gpu-hour`` as it is taken on a machine without GPUs: real runs, read and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import gpu_hour

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_short_ladder_is_a_rehearsal_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_hour.main(["--output", str(tmp_path), "--only", "kernels", "disk"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["device"] == "CPU (a rehearsal)"
    kernels, disk = report["outcomes"]
    assert (kernels["verdict"], kernels["reason"]) == ("skipped", "no CUDA device")
    assert disk["verdict"] == "passed"
    assert disk["figures"]["GB/s"] > 0
    assert disk["figures"]["pause, s"] > 0
    assert "| publication by disk | passed |" in (tmp_path / "report.md").read_text()
