"""Versions of packages: tested and installed."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_async.arguments.cluster import Device
from miles_async.machine.finding import Finding

REQUIREMENTS = Path(__file__).parent / "requirements"  # the repository's folder; a wheel holds a copy
_SOURCES: Mapping[Device, tuple[str, ...]] = {
    "cpu": ("base.in", "nodeps.in", "cpu.in"),
    "cuda": ("base.in", "nodeps.in", "gpu.in"),
}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:==([\w.]+))?")


def set_up(device: Device) -> str:
    """Return the command that installs the tested versions: in a clone, or next to an installed wheel."""
    if REQUIREMENTS.is_symlink():
        return "make setup" if device == "cpu" else "make setup EXTRAS=gpu"
    if device == "cuda":
        return "in a clone of the sources: make setup EXTRAS=gpu"
    files = {name: REQUIREMENTS / name for name in _SOURCES["cpu"]}
    return f"pip install -r {files['base.in']} -r {files['cpu.in']} && pip install --no-deps -r {files['nodeps.in']}"


def installed_for(device: Device) -> Device:
    """Which of the two sets of packages is meant here: that for GPUs may be used without one, on a login node."""
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return device
    return "cuda"


def versions_tested(device: Device) -> dict[str, str | None]:
    """Package → the version that was tested, or None where any will do; later files replace what earlier ones say.
    What only tests read is left out.
    """
    tested: dict[str, str | None] = {}
    for source in _SOURCES[device]:
        for line in (REQUIREMENTS / source).read_text().splitlines():
            words, _, comment = line.partition("#")
            if "tests only" not in comment and (requirement := _REQUIREMENT.match(words.strip())):
                tested[requirement[1]] = requirement[2]
    return tested


def package_findings(tested: Mapping[str, str | None], device: Device) -> Iterator[Finding]:
    missing: list[str] = []
    others: list[str] = []
    same: list[str] = []
    for name, version in tested.items():
        try:
            found = importlib.metadata.version(name).partition("+")[0]  # 2.13.0+cpu
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if version == found:
            same.append(f"{name} {found}")
        elif version is not None:
            others.append(f"{name} {found} ({version})")
    mend = set_up(device)
    if missing:
        yield Finding(check="packages", verdict="failure", found=f"not installed: {', '.join(missing)}", mend=mend)
    if others:
        found = f"other versions than the tested ones (in brackets): {', '.join(others)}"
        yield Finding(check="packages", verdict="warning", found=found, mend=mend)
    if not missing and not others:
        yield Finding(check="packages", verdict="ok", found=", ".join(same))


def platform_version(name: str) -> str:
    """A version that belongs to the platform rather than to a package, from requirements/platform.json."""
    variables = json.loads((REQUIREMENTS / "platform.json").read_text())["variable"]
    return str(variables[name]["default"])
