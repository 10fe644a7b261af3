"""NVIDIA driver, CUDA and NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.cluster import DeviceChoice
from miles_async.machine.finding import Finding, Verdict
from miles_async.machine.packages import platform_version

_DRIVER = Path("/proc/driver/nvidia/version")
_PASS_ON = "in a container: docker run --gpus all; else install NVIDIA's driver (nvidia-smi shows it)"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """GPU facts from driver and torch."""

    driver: str | None  # "580.65.06"; None if the kernel has no NVIDIA driver
    cuda: str | None  # that torch was built with: "13.0"; None for a CPU build
    gpus: tuple[str, ...]  # names, as far as torch can use them
    nccl: str | None  # version in torch


def gpu_facts(driver_file: Path = _DRIVER) -> GpuFacts:
    """Ask the kernel and torch."""
    import torch

    there = torch.cuda.is_available()
    return GpuFacts(
        driver=_driver_version(driver_file),
        cuda=torch.version.cuda,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) if there else (),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if there else None,
    )


def gpu_findings(facts: GpuFacts | None, device: DeviceChoice) -> Iterator[Finding]:
    """Judge the facts for ``--device``; for cpu they don't matter. With auto a machine without GPUs is fine; one whose
    GPUs cannot be used gets a warning, since runs there would quietly use the CPU.
    """
    if facts is None or device == "cpu" or (device == "auto" and facts.driver is None and facts.cuda is None):
        yield Finding(check="GPUs", verdict="ok", found="runs here use the CPU")
        return
    verdict: Verdict = "failure" if device == "cuda" else "warning"
    if facts.cuda is None:
        found = "torch is a CPU build" + (f", next to driver {facts.driver}" if facts.driver else "")
        yield Finding(check="GPUs", verdict=verdict, found=found, mend="make setup EXTRAS=gpu")
        return
    built = f"torch is built for CUDA {facts.cuda}"
    oldest = platform_version("DRIVER_VERSION")
    if facts.gpus:  # also with an older driver, if NVIDIA's compatibility package stands in
        names = ", ".join(f"{facts.gpus.count(name)} × {name}" for name in dict.fromkeys(facts.gpus))
        found = f"{names}; driver {facts.driver or 'unknown'}, CUDA {facts.cuda}, NCCL {facts.nccl}"
        yield Finding(check="GPUs", verdict="ok", found=found)
    elif facts.driver is None:
        yield Finding(check="GPUs", verdict=verdict, found=f"{built}, and there is no driver", mend=_PASS_ON)
    elif int(facts.driver.split(".")[0]) < int(oldest):
        found = f"{built}, which needs driver {oldest} or newer; found {facts.driver}"
        yield Finding(check="GPUs", verdict=verdict, found=found, mend=f"apt-get install nvidia-driver-{oldest}")
    else:
        found = f"driver {facts.driver}, and CUDA shows torch no GPU"
        yield Finding(check="GPUs", verdict=verdict, found=found, mend="nvidia-smi; echo $CUDA_VISIBLE_DEVICES")


def _driver_version(driver_file: Path) -> str | None:
    """Version of the kernel's module, of a line like "NVRM version: NVIDIA UNIX ... Kernel Module  580.65.06  ..."."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver_file.read_text())
    except OSError:
        return None
    return found[1] if found else None
