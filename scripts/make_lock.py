"""Resolves requirements/*.in into requirements/requirements.lock. Run by `make lock`.

Pins that are in the lock stay where they are unless ``--upgrade`` names them (or says ``all``), so that
adding one package moves nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from setup_env import LOCK, canonical, read_pins

REQUIREMENTS = LOCK.parent
RESOLVED = ("base.in", "cpu.in", "dev.in")
WITHOUT_DEPENDENCIES = "nodeps.in"
HEADER = """\
# Complete and exact, for Python 3.11 on CPU. Made by `make lock` from base.in, cpu.in, dev.in and nodeps.in:
# edit those. `make setup` installs it; by hand: pip install --no-deps -r requirements/requirements.lock
"""
# Next to a CPU torch these break the imports of transformers and sglang, or are gigabytes of no use.
REFUSED = re.compile(r"torchvision|torchaudio|triton|nvidia-.*|cuda-.*")


def resolve(constraints: list[str]) -> list[str]:
    """The pins that pip would install for RESOLVED into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder) / "constraints.txt"
        constraint_file.write_text("\n".join(constraints))
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "--constraint", str(constraint_file)]
        for name in RESOLVED:
            command += ["--requirement", str(REQUIREMENTS / name)]
        if subprocess.run(command).returncode:
            sys.exit("error: pip found no solution (see above): `make lock UPGRADE=name,name` lets pins move.")
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    # "+cpu" is where the file came from, not which version it is: other indexes serve it without.
    return [f"{package['name']}=={package['version'].partition('+')[0]}" for package in packages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--upgrade", default="", metavar="all|NAME,NAME", help="pins that may move")
    upgrade = {canonical(name) for name in parser.parse_args().upgrade.split(",") if name}

    before = read_pins(LOCK) if LOCK.exists() else {}
    kept = [] if "all" in upgrade else [pin for name, pin in before.items() if name not in upgrade]
    pins = resolve(kept) + list(read_pins(REQUIREMENTS / WITHOUT_DEPENDENCIES).values())
    if refused := [pin for pin in pins if REFUSED.fullmatch(canonical(pin.partition("==")[0]))]:
        sys.exit(f"error: {', '.join(refused)} must stay out of a CPU environment: find out what wants it.")

    LOCK.write_text(HEADER + "".join(f"{pin}\n" for pin in sorted(pins, key=str.lower)))
    after = read_pins(LOCK)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'absent')} → {after.get(name, 'absent')}")
    print(f"{LOCK.name}: {len(after)} pins")


if __name__ == "__main__":
    main()
