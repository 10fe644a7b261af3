"""Build the image for CPU with buildah and run the quick start in it. Run by `make test-image`.

    python3 scripts/try_image.py

Neither Docker nor a registry is needed: debootstrap makes the base image, and buildah builds with ``--isolation
chroot``. Versions and arguments are those of docker/docker-bake.json; pip has the settings of this machine. Mounts and
processes are in namespaces of their own, and images in a folder that is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
TARGET = "cpu"  # of the bake file
IMAGE = "miles-async:tried"
MIRROR = "http://archive.ubuntu.com/ubuntu"
MACHINE = "/mnt/machine"  # where the build sees files of this machine that pip's settings name
NEEDED = ("buildah", "debootstrap", "unshare")
STEP_LIMIT = 1800.0  # seconds
RUN_DIRECTORY = "/runs/latest"  # what docker/healthcheck.sh looks at
QUICK_START = ["examples/quickstart/run.sh", "--run-dir", RUN_DIRECTORY]


def pip_settings(listed: Sequence[str]) -> tuple[dict[str, str], list[Path]]:
    """Read ``pip config list``, lines such as global.find-links='/wheels'; the environment's win.

    Returns the settings with paths below MACHINE, and the files and folders that they name.
    """
    settings: dict[str, str] = {}
    folders: set[Path] = set()

    def inside(word: str) -> str:
        scheme, path = ("file://", word.removeprefix("file://")) if word.startswith("file://") else ("", word)
        if not path.startswith("/") or not Path(path).exists():
            return word
        folders.add(Path(path).parent if scheme else Path(path))  # an index names files next to its folder
        return f"{scheme}{MACHINE}{path}"

    for line in sorted(listed, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        words = value.strip("'\"").replace("\\n", " ").split()
        settings[name.rpartition(".")[2]] = " ".join(map(inside, words))
    return settings, sorted(folders)


def build_arguments(pip: Mapping[str, str]) -> dict[str, str]:
    """The bake file's build arguments, with the additional package index of this machine."""
    bake = json.loads((ROOT / "docker" / "docker-bake.json").read_text())
    platform = json.loads((ROOT / "requirements" / "platform.json").read_text())["variable"]
    versions = {name: entry["default"] for name, entry in platform.items()}
    target = bake["target"][TARGET]
    merged = {name: value for base in target["inherits"] for name, value in bake["target"][base]["args"].items()}
    values = {name: Template(value).substitute(versions) for name, value in {**merged, **target["args"]}.items()}
    return {**values, "PIP_EXTRA_INDEX_URL": pip.get("extra-index-url", "")}


class Buildah:
    """Runs buildah with its images in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._words = ["buildah", "--root", str(folder / "images"), "--runroot", str(folder / "state")]

    def command(self, *words: str) -> list[str]:
        return [*self._words, *words]

    def in_container(self, container: str, words: Sequence[str]) -> list[str]:
        """A command with the image's user, directory and variables, as `docker exec` would run it."""
        return self.command("run", "--isolation", "chroot", container, "--", *words)

    def run(self, *words: str) -> None:
        run(self.command(*words))

    def output(self, *words: str) -> str:
        return subprocess.check_output(self.command(*words), text=True, timeout=STEP_LIMIT).strip()


def run(command: Sequence[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=STEP_LIMIT)


def build(buildah: Buildah, mirror: str) -> None:
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True).splitlines()
    pip, folders = pip_settings(listed)
    arguments = build_arguments(pip)
    release = arguments["UBUNTU_RELEASE"]
    with timed(f"debootstrap {release}"):
        base = buildah.output("from", "scratch")
        root = buildah.output("mount", base)
        # Debian's debootstrap may know neither the release, which any Ubuntu's script makes, nor its key.
        options = ["--variant=minbase", "--components=main,universe", "--no-check-gpg"]
        run(["debootstrap", *options, release, root, mirror, "gutsy"])
        buildah.run("commit", "--quiet", "--rm", base, f"docker.io/library/ubuntu:{release}")
    configuration = buildah.folder / "pip.conf"
    configuration.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in pip.items())]) + "\n")
    options = ["--isolation", "chroot", "--format", "docker", "--pull-never"]
    options += ["--file", str(ROOT / "docker" / "Dockerfile"), "--target", "image", "--tag", IMAGE]
    options += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    mounts = [f"{configuration}:/etc/pip.conf:ro", *(f"{folder}:{MACHINE}{folder}:ro" for folder in folders)]
    options += [word for mount in mounts for word in ("--volume", mount)]
    with timed("buildah build"):
        buildah.run("build", *options, str(ROOT))


def try_out(buildah: Buildah) -> float:
    """Run the entry point, the health check and the quick start; return the image's size in GB."""
    config = json.loads(buildah.output("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    container = buildah.output("from", "--pull-never", IMAGE)
    files = Path(buildah.output("mount", container))
    size = sum(path.lstat().st_size for path in files.rglob("*")) / 1e9
    health = buildah.in_container(container, config["Healthcheck"]["Test"][1:])
    with timed("the entry point with its own words"):
        run(buildah.in_container(container, [*config["Entrypoint"], *config["Cmd"]]))
    with timed("the health check without a run"):
        run(health)
    with timed(" ".join(QUICK_START)):
        process = subprocess.Popen(buildah.in_container(container, QUICK_START), stdin=subprocess.DEVNULL)
        run_directory = files / RUN_DIRECTORY.lstrip("/")
        healthy = wait_for_health(process, health, run_directory)
        code = process.wait(STEP_LIMIT)
    if code or not healthy:
        raise RuntimeError(f"expected a run that answers and ends with 0, found healthy={healthy} and status {code}")
    summary = run_directory / "summary.json"
    ending = json.loads(summary.read_text())["ending"]
    if ending != "finished" or summary.stat().st_uid == 0:
        raise RuntimeError(f"expected a finished run, not of root, found {ending} of uid {summary.stat().st_uid}")
    return size


def wait_for_health(process: subprocess.Popen[bytes], health: Sequence[str], run_directory: Path) -> bool:
    """True once the health check succeeds with a run there; False if ``process`` ends before."""
    while process.poll() is None:
        if (run_directory / "run.json").exists():
            asked = subprocess.run(health, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
            if asked.returncode == 0:
                return True
        time.sleep(2)
    return False


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    print(f"\n==> {what}", flush=True)
    start = time.monotonic()
    yield
    print(f"--- {time.monotonic() - start:.0f} s", flush=True)


def build_and_try(folder: Path, mirror: str) -> int:
    """All of it, in the namespaces that ``main`` made."""
    buildah, start = Buildah(folder), time.monotonic()
    try:
        build(buildah, mirror)
        size = try_out(buildah)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = f"took more than {error.timeout:.0f} s" if hasattr(error, "timeout") else f"ended with {error.returncode}"
        print(f"error: the last step above {why}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nthe image for CPU works: {time.monotonic() - start:.0f} s, {size:.1f} GB")
    return 0


def missing() -> str:
    """What this machine lacks, or an empty string."""
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return (
            f"expected {', '.join(NEEDED)} on PATH, found no {', '.join(lacking)}: apt-get install buildah debootstrap"
        )
    return "" if os.geteuid() == 0 else f"expected root, which chroot needs, found uid {os.geteuid()}: use sudo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", default=MIRROR, help="Debian's archive (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where images are made, and removed again (default: TMPDIR)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # of the process in the namespaces
    parsed = parser.parse_args()
    if parsed.inside is not None:
        return build_and_try(parsed.inside, parsed.mirror)
    lacking = missing()
    if parsed.folder is not None and not parsed.folder.is_dir():
        lacking = f"expected a folder for --folder, found {parsed.folder}, which is none"
    if lacking:
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder is removed then, too
    with tempfile.TemporaryDirectory(prefix="image-", dir=parsed.folder) as folder:
        command = ["unshare", "--mount", "--pid", "--kill-child", "--mount-proc"]
        command += [sys.executable, __file__, "--inside", folder, "--mirror", parsed.mirror]
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder}, start_new_session=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 130
        finally:  # the kernel ends the namespace with its first process, which is in this session
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
