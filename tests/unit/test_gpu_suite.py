"""What the GPU tests share works without a GPU: reasons to skip, measurements, the file of figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.figures import Figures, Head, chunked_step, peak_bytes, plain_step, seconds_of, why_not

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run here")
def test_every_gpu_test_is_skipped_without_a_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch sees no CUDA device" in done.stdout
    assert " skipped" in done.stdout
    assert " passed" not in done.stdout


def test_a_test_is_skipped_for_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert why_not(()) is None
    assert why_not(("torch", "json.decoder")) is None
    reason = why_not(("torch", "absent_one.part", "absent_two"))
    assert reason == "not installed: absent_one.part, absent_two (docs/gpu_tests.md)"


def test_measured_peaks_are_those_of_the_logits_that_exist_at_one_time() -> None:
    head = Head(tokens=64, width=8, vocabulary=4096, dtype=torch.float32)
    inputs = head.make("cpu")
    torch.testing.assert_close(chunked_step(inputs, 4), plain_step(inputs), rtol=0, atol=1e-5)
    assert head.logits_bytes(4) <= peak_bytes(lambda: chunked_step(inputs, 4), "cpu") < head.logits_bytes(24)
    assert peak_bytes(lambda: plain_step(inputs), "cpu") >= 2 * head.logits_bytes(64)
    assert seconds_of(lambda: chunked_step(inputs, 4), "cpu") > 0


def test_figures_are_in_a_file_with_the_devices_name(tmp_path: Path) -> None:
    figures = Figures(device="NVIDIA H100 80GB HBM3", torch="2.11.0")
    figures.add("export", pinned_gb_s=50.0)
    figures.add("export", pinned_gb_s=51.0)
    path = figures.write(tmp_path / "gpu")
    assert path.name == "NVIDIA-H100-80GB-HBM3.json"
    assert json.loads(path.read_text()) == {
        "device": "NVIDIA H100 80GB HBM3",
        "torch": "2.11.0",
        "measured": {"export": [{"pinned_gb_s": 50.0}, {"pinned_gb_s": 51.0}]},
    }
