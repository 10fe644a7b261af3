"""Collect the wheels that tests/gpu need on a machine with torch and transformers, and no network.

    .venv/bin/python scripts/gpu_wheels.py .wheels               of the lock's versions, for Python 3.12 on x86-64 Linux
    .venv/bin/python scripts/gpu_wheels.py .wheels --python 3.12

docs/gpu_tests.md says what to do with them there. Needs pip and the package index here, and the standard library only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup_env import LOCKS, read_pins

PACKAGES = (
    "megatron-core",
    "megatron-bridge",
    "msgspec",
    "structlog",
    "omegaconf",
    "antlr4-python3-runtime",
    "einops",
    "stamina",
    "tenacity",
    "rich-argparse",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_MB = 64


def download_command(pins: Mapping[str, str], directory: Path, python: str) -> list[str]:
    """The pip command that fetches all of PACKAGES, without what they declare to need."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(directory)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    return [*command, *(pins[name] for name in PACKAGES)]


def megabytes(directory: Path) -> float:
    return sum(wheel.stat().st_size for wheel in directory.glob("*.whl")) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder for the wheels")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    command = download_command(read_pins(LOCKS["gpu"]), parsed.directory, parsed.python)
    if code := subprocess.run(command).returncode:
        return code
    size = megabytes(parsed.directory)
    print(f"{len(list(parsed.directory.glob('*.whl')))} wheels, {size:.1f} MB in {parsed.directory}")
    if size > LIMIT_MB:
        print(
            f"error: expected at most {LIMIT_MB} MB, found {size:.1f}: empty {parsed.directory} first", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
