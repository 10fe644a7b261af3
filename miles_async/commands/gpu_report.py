"""Reports of ``make gpu-hour``, for ``miles-async plan --gpu report.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.machine.packages import versions_tested
from miles_async.simulation.estimates import GB, GPUS

FORMAT = 2  # of the report; 1 had no "plan"
STEP = "lengths"  # the step whose run is long enough to be measured
PACKAGES = ("megatron-core", "sglang")  # another version of these may be as fast as another device


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """Figures that ``scripts/gpu_hour.py`` measured on one kind of GPU."""

    gpu: str  # a name in GPUS
    transport: str
    shares: Mapping[str, float]  # fields of Assumptions
    origin: str  # for people

    def shares_of(self, transport: str) -> Mapping[str, float]:
        """The shares for ``transport``."""
        absent = () if transport == self.transport else ("link", "files")
        return {name: value for name, value in self.shares.items() if name not in absent}


def gpu_named(device: str) -> str | None:
    """The data sheet for a device as ``nvidia-smi`` names it: ``8 × NVIDIA H100 80GB HBM3``."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu}\b", device, re.IGNORECASE)), None)


def read_report(path: Path) -> GpuReport:
    """Raises ConfigurationError if the report does not fit this version, or names no GPU with a data sheet."""
    try:
        report = json.loads(path.read_text())
        machine, steps = report["machine"], {outcome["key"]: outcome for outcome in report["outcomes"]}
    except (OSError, ValueError, LookupError, TypeError):
        report = {}
    if report.get("format") != FORMAT:
        raise ConfigurationError(
            f"--gpu {path}: expected one of {', '.join(GPUS)}, or report.json of `make gpu-hour` in format {FORMAT}, "
            f"found {f'format {report.get("format", 1)}' if report else 'neither'}"
        )
    if (gpu := gpu_named(machine["device"])) is None:
        raise ConfigurationError(
            f"--gpu {path}: expected a report of one of {', '.join(GPUS)}, found {machine['device']!r}"
        )
    tested = versions_tested("cuda")
    if others := [f"{name} {machine[name]} ({tested[name]})" for name in PACKAGES if machine[name] != tested[name]]:
        raise ConfigurationError(
            f"--gpu {path}: expected this version's packages (in brackets), found {', '.join(others)}: run "
            "`make gpu-hour` again"
        )
    if STEP not in steps or steps[STEP]["verdict"] != "passed":
        raise ConfigurationError(f"--gpu {path}: expected that the step {STEP} passed: run `make gpu-hour` again")
    figures = steps[STEP]["figures"]
    (seen,) = figures["plan"]
    return GpuReport(
        gpu=gpu,
        transport=seen["transport"],
        shares=seen["shares"],
        origin=(
            f"{path} ({machine['device']}, {machine['date']}; a model of {seen['weights'] / GB:.2g} B weights, of "
            f"which larger ones reach more; a start took {figures['start, s']:.3g} s)"
        ),
    )
