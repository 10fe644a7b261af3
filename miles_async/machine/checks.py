"""The checks of one machine, in the order in which their findings are shown."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.cluster import Device, DeviceChoice
from miles_async.arguments.model_files import directory_problems, read_config
from miles_async.backends.megatron.families.hf_config import check_model
from miles_async.errors import ConfigurationError
from miles_async.machine.finding import Finding
from miles_async.machine.gpus import gpu_facts, gpu_findings
from miles_async.machine.limits import (
    disk_findings,
    home_findings,
    locked_memory_findings,
    process_findings,
    shared_memory_findings,
)
from miles_async.machine.network import interface_findings, port_findings
from miles_async.machine.packages import installed_for, package_findings, set_up, versions_tested
from miles_async.runtime.device import choose_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    device: DeviceChoice = "auto"
    own_gpus: bool = True  # False: GPUs are on other nodes, this machine may have none
    ports: range | None = None  # of its servers; None: any
    directories: Mapping[str, Path] = field(default_factory=dict)  # that it writes to, by what they are for


def device_found(choice: DeviceChoice) -> tuple[Device, str]:
    """Return the device that ``--device`` means here, and why torch cannot say so, or an empty string."""
    try:
        return choose_device(choice), ""
    except (ImportError, OSError) as error:  # one of CUDA's libraries is not there, say
        return "cpu", f"cannot be imported: {error}"


def machine_findings(intent: Intent) -> Iterator[Finding]:
    """Check this machine, contacting no other. Takes milliseconds, and unless for cpu the import of torch."""
    device, unusable = device_found(intent.device)
    packages = installed_for(device)
    yield from package_findings(versions_tested(packages), packages)
    if unusable:
        yield Finding(check="torch", verdict="failure", found=unusable, mend=set_up(packages))
    elif intent.own_gpus:
        yield from gpu_findings(None if intent.device == "cpu" else gpu_facts(), intent.device)
    yield from shared_memory_findings(device if intent.own_gpus else "cpu")
    yield from disk_findings({**intent.directories, "TMPDIR": Path(tempfile.gettempdir())})
    yield from home_findings()
    yield from process_findings()
    yield from locked_memory_findings()
    yield from port_findings(intent.ports)
    yield from interface_findings()


def model_findings(directory: Path) -> Iterator[Finding]:
    """Check that the directory holds a whole model of a family that can be trained."""
    problems = list(directory_problems(directory, "--hf-checkpoint"))
    for problem in problems:
        yield Finding(
            check="model", verdict="failure", found=problem, mend=f"hf download <model> --local-dir {directory}"
        )
    if problems:
        return
    try:
        check_model(config := read_config(directory), directory)
    except ConfigurationError as error:
        yield Finding(check="model", verdict="failure", found=str(error), mend="choose a model that can be trained")
    else:
        kind = config.get("model_type", "unknown")
        yield Finding(check="model", verdict="ok", found=f"{directory}: whole, of the family {kind}")
