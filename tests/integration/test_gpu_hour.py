"""A short ladder of ``make gpu-hour`` as it is taken on a machine without GPUs: real runs, read and judged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_async.commands.measured import measured
from miles_async.commands.plan import plan
from miles_async.errors import ConfigurationError
from miles_async.simulation.distributions import median
from scripts import gpu_hour
from scripts.gpu_steps import Bench

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.long
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
    with pytest.raises(ConfigurationError, match="found 'CPU"):
        plan(["--gpu", str(tmp_path / "report.json")])


@pytest.mark.long
def test_a_plan_repeats_what_its_report_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the flags of the run that was measured, on a CPU that passes for an H100."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Bench, "name", "1 × NVIDIA H100 80GB HBM3")
    assert gpu_hour.main(["--output", str(tmp_path), "--only", "lengths"]) == 0
    path = tmp_path / "report.json"
    figures = json.loads(path.read_text())["outcomes"][0]["figures"]
    (config,) = tmp_path.glob("*/real_lengths/config.toml")
    (seen,) = figures["plan"]
    assert figures["MFU"] == seen["shares"]["mfu"] > 0
    flags = ("--config", str(config), "--gpu", str(path), "--steps", "4", "--sweep", "max-weight-staleness=2")
    sizes = ("--response-tokens", str(seen["response_tokens"]), "--prompt-tokens", str(seen["prompt_tokens"]))
    text = plan([*flags, *sizes])
    assert "training reaches" in text.partition("Measured in")[2].partition("Assumed")[0]
    assert "files are written" in text.partition("Assumed")[2]
    trained = median(measured(config.parent).train)
    assert trained == pytest.approx(float(re.search("training step ([\\d.]+) s", text)[1]), rel=0.05)  # type: ignore[index]
    pause = 4 * seen["weights"] / seen["shares"]["link"]
    assert pause == pytest.approx(float(re.search("chosen.* ([\\d.e-]+)", text)[1]), rel=0.05)  # type: ignore[index]
