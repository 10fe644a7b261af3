"""Resolve requirements/*.in into requirements.lock, for CPU, gpu.lock, docs.lock and extras.lock. Run by `make lock`.

Pins that are in a lock stay where they are unless ``--upgrade`` names them (or says ``all``), so that adding one
package moves nothing else. gpu.lock has the pins of requirements.lock except where gpu.in replaces them, extras.lock
has them except where an extra excludes them. ``--check`` writes nothing, and fails when the indexes no
longer have what is locked, or a lock is not what its sources ask for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import setup_env
from setup_env import canonical, platform_version, read_pins

REQUIREMENTS = setup_env.LOCKS[""].parent
LOCKS = setup_env.LOCKS | {name: REQUIREMENTS / f"{name}.lock" for name in ("docs", "extras")}  # of one target each
WITHOUT_DEPENDENCIES = REQUIREMENTS / "nodeps.in"
GPU = REQUIREMENTS / "gpu.in"
HEADER = """\
# Complete and exact, for Python {python} on {platform}. Made by `make lock` from {sources}:
# edit those. `make {target}` installs it with `--no-deps`.
"""
# Next to a CPU torch these break the imports of transformers and sglang, or are gigabytes of no use.
REFUSED_ON_CPU = re.compile(r"torchvision|torchaudio|triton|nvidia-.*|cuda-.*")

Pins = Mapping[str, str]  # canonical name → "name==version"


@dataclass(frozen=True, slots=True)
class Sources:
    """The files that are resolved to one lock, and the platform they are resolved for."""

    target: str  # of make, that installs the lock
    platform: str
    files: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The files to resolve; packages of nodeps.in are added as they are."""
        return [str(REQUIREMENTS / name) for name in self.files if name != WITHOUT_DEPENDENCIES.name]

    def text(self, pins: Pins) -> str:
        python = platform_version("PYTHON_VERSION")
        sources = " and ".join(", ".join(self.files).rsplit(", ", 1))
        header = HEADER.format(python=python, platform=self.platform, sources=sources, target=self.target)
        return header + "".join(f"{pin}\n" for pin in sorted(pins.values(), key=str.lower))


SOURCES = {
    "": Sources("setup", "CPU", ("base.in", "cpu.in", "dev.in", "nodeps.in")),
    "gpu": Sources("setup EXTRAS=gpu", "x86-64 Linux with CUDA", ("base.in", "gpu.in", "dev.in", "nodeps.in")),
    "docs": Sources("docs", "any platform", ("docs.in",)),
    "extras": Sources("test-extras", "any platform", ("mlflow.in", "trackio.in", "swanlab.in", "reasoning-gym.in")),
}


def by_name(pins: Iterable[str]) -> dict[str, str]:
    return {canonical(pin.partition("==")[0]): pin for pin in pins}


def resolve_for_cpu(constraints: Path) -> list[str]:
    """Ask pip, whose settings on this machine say where CPU builds of torch are."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", report.name, "--constraint", str(constraints)]
        command += [word for path in SOURCES[""].paths for word in ("--requirement", path)]
        if subprocess.run(command).returncode:
            sys.exit("error: pip found no solution (see above): `make lock UPGRADE=name,name` lets pins move.")
        packages = [item["metadata"] for item in json.load(report)["install"]]
    # "+cpu" is where the file came from, not which version it is: other indexes serve it without.
    pins = [f"{package['name']}=={package['version'].partition('+')[0]}" for package in packages]
    [torch] = [package for package in packages if package["name"] == "torch"]
    if setup_env.cuda_libraries(torch):  # pip offers no CPU build; set-up adds the libraries that its build declares
        pins = [pin for pin in pins if not canonical(pin).startswith(setup_env.CUDA_LIBRARIES)]
    if refused := [pin for name, pin in by_name(pins).items() if REFUSED_ON_CPU.fullmatch(name)]:
        sys.exit(f"error: {', '.join(refused)} must stay out of a CPU environment: find out what wants it.")
    return pins


def resolve_for_gpus(constraints: Path) -> list[str]:
    glibc = platform_version("GLIBC_VERSION").replace(".", "_")
    platform = ["--python-platform", f"x86_64-manylinux_{glibc}", "--config-file", str(REQUIREMENTS / "uv.toml")]
    return resolve_with_uv(SOURCES["gpu"], constraints, *platform)


def resolve_for_docs(constraints: Path) -> list[str]:
    return resolve_with_uv(SOURCES["docs"], constraints)


def resolve_for_extras(preferences: Path) -> list[str]:
    """``preferences``: pins that stay where the extras allow it; the result replaces them."""
    resolve_with_uv(SOURCES["extras"], None, "--output-file", str(preferences))
    return [line for line in preferences.read_text().splitlines() if "==" in line]


def resolve_with_uv(sources: Sources, constraints: Path | None, *options: str) -> list[str]:
    """Ask uv, which needs metadata only (requirements/uv.toml), and not pip's settings: those may be for CPU builds."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options]
    command += ["--python-version", platform_version("PYTHON_VERSION")]
    command += ["--constraints", str(constraints)] if constraints else []
    done = subprocess.run([*command, *sources.paths], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("error: uv found no solution (see above): `make lock UPGRADE=name,name` lets pins move.")
    return [line for line in done.stdout.splitlines() if "==" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--upgrade", default="", metavar="all|NAME,NAME", help="pins that may move")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a lock would change")
    parsed = parser.parse_args()
    upgrade = {canonical(name) for name in parsed.upgrade.split(",") if name}

    def kept(pins: Pins) -> dict[str, str]:
        return {} if "all" in upgrade else {name: pin for name, pin in pins.items() if name not in upgrade}

    without_dependencies = read_pins(WITHOUT_DEPENDENCIES)
    before = {extras: read_pins(lock) if lock.exists() else {} for extras, lock in LOCKS.items()}
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(kept(before[""]).values()))
        cpu = by_name(resolve_for_cpu(constraints)) | without_dependencies
        replaced = {canonical(re.split(r"[^\w.-]", line)[0]) for line in GPU.read_text().splitlines()}
        shared = {name: pin for name, pin in cpu.items() if name not in replaced}
        constraints.write_text("\n".join((kept(before["gpu"]) | shared).values()))
        gpu = without_dependencies | by_name(resolve_for_gpus(constraints))
        constraints.write_text("\n".join(kept(before["docs"]).values()))
        docs = by_name(resolve_for_docs(constraints))
        shared_before = {(name, pin.partition("==")[2]) for name, pin in before[""].items()}  # names differ in case
        pins = kept(before["extras"])
        own = {name: pin for name, pin in pins.items() if (name, pin.partition("==")[2]) not in shared_before}
        constraints.write_text("\n".join((cpu | own).values()))
        extras = by_name(resolve_for_extras(constraints))

    changed = False
    for name, pins in {"": cpu, "gpu": gpu, "docs": docs, "extras": extras}.items():
        lock, was = LOCKS[name], before[name]
        for package in sorted(was.keys() | pins.keys()):
            if was.get(package) != pins.get(package):
                changed = True
                print(f"{lock.name}: {was.get(package, 'absent')} → {pins.get(package, 'absent')}")
        if not parsed.check:
            lock.write_text(SOURCES[name].text(pins))
        print(f"{lock.name}: {len(pins)} pins")
    if parsed.check and changed:
        sys.exit("error: expected the locks to stay as they are, found the changes above: run `make lock`.")


if __name__ == "__main__":
    main()
