"""NVIDIA driver, CUDA, NCCL and cuDNN."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.cluster import DeviceChoice
from miles_async.machine.finding import Finding, Verdict
from miles_async.machine.packages import platform_version, set_up

_DRIVER = Path("/proc/driver/nvidia/version")
_LOADS_CUDNN = """
import os
from miles_async.runtime.cuda_environment import use_installed_cudnn
use_installed_cudnn(os.environ)
import torch, transformer_engine.pytorch
print(open("/proc/self/maps").read())
"""
_LOAD_SECONDS = 300
_PASS_ON = "in a container: docker run --gpus all; else install NVIDIA's driver (nvidia-smi shows it)"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    driver: str | None  # "580.65.06"; None if the kernel has no NVIDIA driver
    cuda: str | None  # that torch was built with: "13.0"; None for a CPU build
    gpus: tuple[str, ...]  # names of those that torch can use
    nccl: str | None  # version in torch


def gpu_facts(driver_file: Path = _DRIVER) -> GpuFacts:
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
    built, oldest = f"torch is built for CUDA {facts.cuda}", platform_version("DRIVER_VERSION")
    if facts.cuda is None:
        found = "torch is a CPU build" + (f", next to driver {facts.driver}" if facts.driver else "")
        mend = set_up("cuda")
    elif facts.gpus:  # also with an older driver, if NVIDIA's compatibility package stands in
        names = ", ".join(f"{facts.gpus.count(name)} × {name}" for name in dict.fromkeys(facts.gpus))
        found = f"{names}; driver {facts.driver or 'unknown'}, CUDA {facts.cuda}, NCCL {facts.nccl}"
        verdict, mend = "ok", ""
    elif facts.driver is None:
        found, mend = f"{built}, and there is no driver", _PASS_ON
    elif int(facts.driver.split(".")[0]) < int(oldest):
        found = f"{built}, which needs driver {oldest} or newer; found {facts.driver}"
        mend = f"apt-get install nvidia-driver-{oldest}"
    else:
        found = f"driver {facts.driver}, and CUDA shows torch no GPU"
        mend = "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"
    yield Finding(check="GPUs", verdict=verdict, found=found, mend=mend)


def rank_libraries() -> str | None:
    """What a trainer rank with Transformer Engine maps into its memory (/proc/self/maps), of a process that imports
    what a rank does; None without Transformer Engine, or if the import fails.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    command = [sys.executable, "-c", _LOADS_CUDNN]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def cudnn_findings(libraries: str | None) -> Iterator[Finding]:
    """Check that a rank loads one cuDNN: two, torch's and a system's, call each other's functions.

    ``libraries``: of :func:`rank_libraries`.
    """
    found = sorted(set(re.findall(r"/\S*libcudnn\.so\S*", libraries or "")))
    if len(found) > 1:
        mend = f"unset CUDNN_HOME CUDNN_PATH, or export CUDNN_PATH={Path(found[0]).parent.parent}"
        yield Finding(check="cuDNN", verdict="failure", found=f"a rank loads two: {', '.join(found)}", mend=mend)
    elif found:
        yield Finding(check="cuDNN", verdict="ok", found=found[0])


def _driver_version(driver_file: Path) -> str | None:
    """Version of the kernel's module, of a line like "NVRM version: NVIDIA UNIX ... Kernel Module  580.65.06  ..."."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver_file.read_text())
    except OSError:
        return None
    return found[1] if found else None
