"""Execute docker/Dockerfile for CPU in a Debian root, then the quick start in it. Run by `make test-image`.

    python3 scripts/try_image.py

Docker and a registry of images are not needed; root, debootstrap and Debian's archive are. The versions and arguments
are those of docker/docker-bake.json. pip has the settings that it has on this machine. What is left out: layers, the
builder's cache, and the isolation of a container's network.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from debian_root import MACHINE, NEEDED, DebianRoot, User, end, run, started
from dockerfile import Context, Dockerfile, DockerfileError, Instruction, expand, read

ROOT = Path(__file__).resolve().parent.parent
TARGET = "cpu"  # of the bake file
MIRROR = "http://deb.debian.org/debian"
STEP_LIMIT = 1800.0  # seconds, for the environment above all
PATH_OF_DOCKER = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN_DIRECTORY = "/runs/latest"  # what docker/healthcheck.sh looks at
QUICK_START = ["examples/quickstart/run.sh", "--run-dir", RUN_DIRECTORY]
_BASE = re.compile(r"debian:(\w+)-slim")


@dataclass
class Image:
    """What the steps have made so far."""

    root: DebianRoot
    user: str = "root"
    directory: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATH_OF_DOCKER})
    entry_point: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # CMD
    health: list[str] = field(default_factory=list)

    def command(self, words: Sequence[str]) -> list[str]:
        """As `docker run` would."""
        user = self.root.user(self.user)
        return self.root.command(words, user=user, directory=self.directory, variables=self.variables)

    def command_beside(self, process: subprocess.Popen[bytes], words: Sequence[str]) -> list[str]:
        """As `docker exec` would, and as health checks are run."""
        user = self.root.user(self.user)
        return self.root.command_beside(process, words, user=user, directory=self.directory, variables=self.variables)

    def place(self, path: str) -> Path:
        return self.root.path / os.path.normpath(os.path.join(self.directory, path)).lstrip("/")


@dataclass(frozen=True)
class PipSettings:
    """pip's settings on this machine, as variables; files and folders that they name are seen below MACHINE."""

    variables: dict[str, str]
    folders: list[Path]


def pip_settings(listed: Sequence[str]) -> PipSettings:
    """Read ``pip config list``: lines such as global.find-links='/wheels'; those of the environment win."""
    variables: dict[str, str] = {}
    folders: set[Path] = set()

    def inside(word: str) -> str:
        scheme, path = ("file://", word.removeprefix("file://")) if word.startswith("file://") else ("", word)
        if not path.startswith("/") or not Path(path).exists():
            return word
        # Pages of an index name files beside its folder.
        folders.add(Path(path).parent if scheme else Path(path))
        return f"{scheme}{MACHINE}{path}"

    for line in sorted(listed, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        words = value.strip("'\"").replace("\\n", " ").split()
        variables["PIP_" + name.rpartition(".")[2].replace("-", "_").upper()] = " ".join(map(inside, words))
    return PipSettings(variables, sorted(folders))


def build_arguments(pip: PipSettings) -> dict[str, str]:
    """Those of the bake file; what pip is told on this machine wins, as with `docker build --build-arg`."""
    bake = json.loads((ROOT / "docker" / "docker-bake.json").read_text())
    platform = json.loads((ROOT / "requirements" / "platform.json").read_text())["variable"]
    values = {name: entry["default"] for name, entry in platform.items()}
    target = bake["target"][TARGET]
    parents = [bake["target"][name]["args"] for name in target.get("inherits", ())]
    merged = {name: value for each in [*parents, target["args"]] for name, value in each.items()}
    return {name: pip.variables.get(name, expand(value, values)) for name, value in merged.items()}


class Builder:
    """Executes instructions in the root of an image."""

    def __init__(self, image: Image, given: Mapping[str, str], context: Context, pip: PipSettings) -> None:
        self._image = image
        self._given = given
        self._context = context
        self._pip = pip
        self._arguments: dict[str, str] = {}

    def enter_stage(self) -> None:
        """A stage knows its own ARG only."""
        self._arguments = {}

    def execute(self, step: Instruction) -> None:
        image = self._image
        values = self._arguments | image.variables
        match step.name:
            case "ARG":
                name, _, default = step.rest.partition("=")
                self._arguments[name] = self._given.get(name, default)
            case "ENV":
                image.variables |= step.assignments(values)
            case "SHELL":
                image.shell = step.command
            case "USER":
                image.user = step.rest
            case "WORKDIR":
                image.directory = step.rest
                image.place(".").mkdir(parents=True, exist_ok=True)
            case "RUN":
                self._run([*image.shell, step.words])
            case "COPY":
                self._copy(step)
            case "HEALTHCHECK":
                _, _, words = step.rest.partition("CMD ")
                image.health = json.loads(words)
            case "ENTRYPOINT":
                image.entry_point = step.command
            case "CMD":
                image.words = step.command
            case _:
                raise DockerfileError(f"line {step.line}: {step.name} can be read, but not executed here")

    def _run(self, words: Sequence[str]) -> None:
        image = self._image
        variables = self._pip.variables | image.variables | self._arguments
        user = image.root.user(image.user)
        command = image.root.command(
            words, user=user, directory=image.directory, variables=variables, folders=self._pip.folders
        )
        run(command, STEP_LIMIT)

    def _copy(self, step: Instruction) -> None:
        if unknown := step.flags.keys() - {"chown"}:
            raise DockerfileError(f"line {step.line}: expected COPY --chown, found --{min(unknown)}")
        *sources, target = step.words.split()
        if len(sources) > 1 and not target.endswith("/"):
            raise DockerfileError(f"line {step.line}: expected a folder with / at its end, found {target}")
        image = self._image
        owner = image.root.user(step.flags.get("chown", "root"))
        for source in sources:
            whole = (self._context.root / source).is_dir()
            for name in self._context.files(source):
                below = os.path.relpath(name, source) if whole else os.path.basename(name)
                _copy_file(self._context.root / name, image.place(os.path.join(target, below)), owner)


def _copy_file(source: Path, target: Path, owner: User) -> None:
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)
    for path in [target, *made]:
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def build(root: DebianRoot, file: Dockerfile, pip: PipSettings, mirror: str) -> Image:
    given = build_arguments(pip)
    base, stages = file.chain("image", given)
    found = _BASE.fullmatch(base)
    if found is None:
        raise DockerfileError(f"line {stages[0].line}: expected debian:RELEASE-slim at the bottom, found {base}")
    with timed(f"debootstrap {found[1]}"):
        root.bootstrap(found[1], mirror, STEP_LIMIT)
    image = Image(root)
    builder = Builder(image, given, Context(ROOT), pip)
    for stage in stages:
        builder.enter_stage()
        for step in stage.steps:
            with timed(f"line {step.line}: {step.name} {step.rest}"):
                builder.execute(step)
    return image


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    print(f"\n==> {what if len(what) < 100 else what[:97] + '...'}", flush=True)
    start = time.monotonic()
    yield
    print(f"--- {time.monotonic() - start:.0f} s", flush=True)


def try_out(image: Image) -> None:
    """What docs/docker.md promises: the entry point, the health check, the quick start, and nobody is root."""
    if image.root.user(image.user).uid == 0:
        raise DockerfileError("expected a user who is not root at the end, found root")
    with timed("the entry point with its own words"):
        run(image.command([*image.entry_point, *image.words]), 120)
    with timed("the health check without a run"):
        run(image.command(image.health), 120)
    with timed(" ".join(QUICK_START)), started(image.command(QUICK_START)) as process:
        try:
            healthy = wait_for_health(image, process)
            code = process.wait(STEP_LIMIT)
        finally:
            end(process)
    if code or not healthy:
        raise RuntimeError(f"expected a run that answers and ends with 0, found healthy={healthy} and status {code}")
    summary = image.place(RUN_DIRECTORY) / "summary.json"
    ending = json.loads(summary.read_text())["ending"]
    if ending != "finished" or summary.stat().st_uid == 0:
        raise RuntimeError(f"expected a finished run, not of root, found {ending} of uid {summary.stat().st_uid}")


def wait_for_health(image: Image, process: subprocess.Popen[bytes]) -> bool:
    """Whether the health check succeeds while the run is there, as Docker asks every minute."""
    while process.poll() is None:
        if (image.place(RUN_DIRECTORY) / "run.json").exists():
            command = image.command_beside(process, image.health)
            asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
            if asked.returncode == 0:
                return True
        time.sleep(2)
    return False


def missing() -> str:
    """What this machine lacks, or an empty string."""
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return f"expected {', '.join(NEEDED)} on PATH, found no {', '.join(lacking)}: apt-get install debootstrap mount"
    return "" if os.geteuid() == 0 else f"expected root, which chroot needs, found uid {os.geteuid()}: use sudo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", default=MIRROR, help="Debian's archive (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the root is made, and removed again (default: TMPDIR)")
    parsed = parser.parse_args()
    lacking = missing()
    if parsed.folder is not None and not parsed.folder.is_dir():
        lacking = f"expected a folder for --folder, found {parsed.folder}, which is none"
    if lacking:
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed then, too
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="image-", dir=parsed.folder) as folder:
            root = DebianRoot(Path(folder) / "root")
            image = build(
                root, read(ROOT / "docker" / "Dockerfile"), pip_settings(listed.stdout.splitlines()), parsed.mirror
            )
            try_out(image)
            size = sum(path.lstat().st_size for path in root.path.rglob("*")) / 1e9
    except KeyboardInterrupt:
        return 130
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = f"took more than {error.timeout:.0f} s" if hasattr(error, "timeout") else f"ended with {error.returncode}"
        print(f"error: the last step above {why}", file=sys.stderr)
        return 1
    except (DockerfileError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nthe image for CPU works: {time.monotonic() - start:.0f} s, {size:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
