"""Driver, CUDA and NCCL are judged from what kernel and torch say."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments.cluster import DeviceChoice
from miles_async.machine.gpus import GpuFacts, cudnn_findings, gpu_facts, gpu_findings

DRIVER_LINE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\nGCC version: 12\n"
)


def facts(driver: str | None, cuda: str | None, *gpus: str) -> GpuFacts:
    return GpuFacts(driver=driver, cuda=cuda, gpus=gpus, nccl="2.28.3" if gpus else None)


@pytest.mark.parametrize(
    ("found", "device", "verdict", "words", "mend"),
    [
        (facts(None, None), "auto", "ok", "use the CPU", ""),
        (facts("580.65", "13.0", "H100"), "cpu", "ok", "use the CPU", ""),
        (facts("580.65", "13.0", "H100", "H100"), "auto", "ok", "2 × H100; driver 580.65, CUDA 13.0, NCCL 2.28.3", ""),
        (facts(None, "13.0", "H100"), "auto", "ok", "driver unknown", ""),  # a container may hide /proc/driver
        (facts("570.10", "13.0", "H100"), "cuda", "ok", "driver 570.10", ""),  # with NVIDIA's compatibility package
        (facts("580.65", None), "auto", "warning", "CPU build, next to driver 580.65", "make setup EXTRAS=gpu"),
        (facts(None, None), "cuda", "failure", "torch is a CPU build", "make setup EXTRAS=gpu"),
        (facts(None, "13.0"), "cuda", "failure", "there is no driver", "docker run --gpus all"),
        (facts("535.104", "13.0"), "cuda", "failure", "driver 580 or newer; found 535.104", "nvidia-driver-580"),
        (facts("535.104.05", "13.0"), "auto", "warning", "needs driver 580 or newer", "nvidia-driver-580"),
        (facts("580.65", "13.0"), "cuda", "failure", "CUDA shows torch no GPU", "CUDA_VISIBLE_DEVICES"),
    ],
)  # fmt: skip
def test_each_fault_is_told_with_its_remedy(
    found: GpuFacts, device: DeviceChoice, verdict: str, words: str, mend: str
) -> None:
    [finding] = gpu_findings(found, device)
    assert finding.verdict == verdict
    assert words in finding.found
    assert mend in finding.mend
    assert bool(finding.mend) == (verdict != "ok")


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(DRIVER_LINE.format("580.65.06"))
    assert gpu_facts(tmp_path / "version").driver == "580.65.06"
    assert gpu_facts(tmp_path / "absent").driver is None


PACKAGE, SYSTEM = "/venv/nvidia/cudnn/lib/libcudnn.so.9", "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.10.2"


@pytest.mark.parametrize(
    ("loaded", "verdict"), [((), None), ((PACKAGE, PACKAGE), "ok"), ((PACKAGE, SYSTEM, PACKAGE), "failure")]
)
def test_a_rank_loads_one_cudnn(loaded: tuple[str, ...], verdict: str | None) -> None:
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 1  {path}\n" for path in ("/lib/libc.so.6", *loaded))
    findings = list(cudnn_findings(maps))
    assert [finding.verdict for finding in findings] == [verdict] * bool(verdict)
    if verdict == "failure":
        assert f"{SYSTEM}, {PACKAGE}" in findings[0].found
        assert "CUDNN_PATH" in findings[0].mend
    assert not list(cudnn_findings(None)), "no Transformer Engine: torch's alone"
