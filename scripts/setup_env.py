"""Builds .venv from a lock of requirements/, or brings it up to date; does nothing when it is current.

Run by `make setup` with the Python that the machine has, before anything is installed: standard library only,
and in the syntax of Python 3.6, so that an interpreter that is too old can say so.
"""

import argparse
import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
# Per choice of EXTRAS: all packages, exact, installed without asking what they declare.
LOCKS = {"": ROOT / "requirements" / "requirements.lock", "gpu": ROOT / "requirements" / "gpu.lock"}
PLATFORM = ROOT / "requirements" / "platform.json"
COMPILED = {"transformer-engine-torch"}  # against the torch of the lock, which is therefore installed before
COSTS = {"": "2-3 minutes, 2 GB", "gpu": "11 GB"}
COMPILATION_COSTS = "20 minutes of one core"
CUDA_TORCH_COSTS = "about 2 minutes and 4 GB more"
CUDA_TORCH_GIB = 10  # on top of what the lock needs
CUDA_LIBRARIES = ("cuda-", "nvidia-", "triton")  # beginnings of the names of what a CUDA build of torch declares
NEEDED_GIB = {"": 4, "gpu": 40}  # half of it installed, the rest for downloads and objects of the compiler on their way
TAIL_LINES = 12
LINE_LENGTH = 300  # pip names all packages in one line
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
TORCH_OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "universal_newlines": True}
# Of gcc, nvcc and the linker.
COMPILER_ERROR = re.compile(
    r"[:(]\d+\)?: (fatal )?error|: fatal error: |nvcc fatal|undefined reference|cannot find -l|CMake Error"
)
NOT_LOCKED = {"pip", "miles-async"}  # pip comes with the environment; the project is what is being set up


def platform_version(name: str) -> str:
    return json.loads(PLATFORM.read_text())["variable"][name]["default"]


PYTHON = "python" + platform_version("PYTHON_VERSION")
PYTHON_VERSION = tuple(int(number) for number in platform_version("PYTHON_VERSION").split("."))
CUDA_FOLDER = "cu" + platform_version("CUDA_VERSION").split(".")[0]  # of NVIDIA's packages, laid out as a toolkit


def fail(message: str) -> None:
    sys.exit("error: " + message)


def say(message: str) -> None:
    print("set-up: " + message, flush=True)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict:
    """``name==version`` lines of a requirements file, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonical(line.partition("==")[0]): line for line in lines if "==" in line}


def fingerprint(extras: str) -> str:
    """Changes with all that decides what is in .venv, and when the tree has moved (scripts hold its path)."""
    digest = hashlib.sha256((str(ROOT) + "\n" + extras).encode())
    for path in [ROOT / "pyproject.toml", PLATFORM, *sorted((ROOT / "requirements").glob("*.[il]*"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_machine(extras: str) -> None:
    """What must hold before anything is downloaded. On CPU nothing is compiled, now or at run time."""
    found = "{}.{}.{}".format(*sys.version_info[:3])
    if sys.version_info[:2] != PYTHON_VERSION:
        fail(
            f"Python {PYTHON[6:]} is needed, but {sys.executable} is {found}: install Python {PYTHON[6:]}, or run "
            f"`make setup PYTHON=<path of {PYTHON}>`."
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(
            f"the venv module of Python {found} is missing: install it (Debian, Ubuntu: `apt-get install "
            f"{PYTHON}-venv`)."
        )
    free = shutil.disk_usage(str(ROOT)).free / 2**30
    if free < NEEDED_GIB[extras]:
        fail(
            f"{free:.1f} GiB are free at {ROOT}, but the environment needs about {NEEDED_GIB[extras]} GiB: "
            "make room and run `make setup` again."
        )
    if extras == "gpu":
        check_compilation()


def check_compilation() -> None:
    """Check for the tools that building for GPUs needs. CUDA's compiler and headers come with the lock."""
    problems = []
    if not shutil.which("c++"):
        problems.append("there is no C++ compiler on PATH: apt-get install g++")
    python_header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not python_header.is_file():
        problems.append(f"there is no {python_header}: apt-get install {PYTHON}-dev")
    problems += glibc_problems()
    if problems:
        fail(
            "this machine cannot build Transformer Engine, which is compiled during the set-up:\n  - "
            + "\n  - ".join(problems)
        )


def glibc_problems() -> list:
    """Wheels for GPUs are of a manylinux that older C libraries cannot load."""
    found = os.confstr("CS_GNU_LIBC_VERSION") or "none"  # glibc 2.36
    wanted = platform_version("GLIBC_VERSION")
    numbers = re.search(r"(\d+)\.(\d+)", found)
    if numbers and [int(number) for number in numbers.groups()] >= [int(number) for number in wanted.split(".")]:
        return []
    return [f"the C library is {found}, and wheels for GPUs need glibc {wanted}: use a newer system"]


def environment_is_usable() -> bool:
    """Whether .venv is whole and belongs to this folder (was neither moved nor copied here)."""
    pip_script = VENV / "bin" / "pip"
    if not pip_script.exists() or str(VENV_PYTHON.parent) not in pip_script.read_text():
        return False
    # A half-made environment can run the base Python instead, and pip would change the machine's packages.
    code = "import pip, sys; sys.exit(sys.version_info[:2] != {} or sys.prefix != {!r})"
    command = [str(VENV_PYTHON), "-c", code.format(PYTHON_VERSION, str(VENV))]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def create_environment() -> None:
    say("creating .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done = subprocess.run(command, universal_newlines=True, **OUTPUT)
    if done.returncode:
        fail("`{}` failed:\n{}".format(" ".join(command), done.stdout.strip()))


def nvidia_packages(venv: Path) -> Path:
    return venv / "lib" / PYTHON / "site-packages" / "nvidia"


def complete_toolkit(venv: Path) -> None:
    """
    Gives the folder of NVIDIA's packages the names by which SGLang and FlashInfer link with a toolkit, so that it
    serves as CUDA_HOME: kernels are compiled at run time.
    """
    toolkit = nvidia_packages(venv) / CUDA_FOLDER
    links = {toolkit / "lib64": "lib"}
    links.update({library.with_suffix(""): library.name for library in (toolkit / "lib").glob("libcudart.so.*")})
    for link, target in links.items():
        if not link.exists():
            link.symlink_to(target)


def build_environment(venv: Path) -> dict:
    """
    Variables for compiling Transformer Engine with the headers of the lock's packages, whatever toolkit and cuDNN the
    system has (its build passes on no include folder but CUDA_HOME's), by ninja, which takes all cores; and no attempt
    to download a wheel first, which waits for a network without a limit of time.
    """
    nvidia = nvidia_packages(venv)
    headers = [str(nvidia / name / "include") for name in ("cudnn", "nccl")]
    return dict(
        os.environ,
        CUDA_HOME=str(nvidia / CUDA_FOLDER),
        CUDNN_HOME=str(nvidia / "cudnn"),
        CUDNN_PATH=str(nvidia / "cudnn"),
        CPATH=os.pathsep.join(headers + [path for path in [os.environ.get("CPATH")] if path]),
        PATH=os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", os.defpath)]),
        NVTE_PYTORCH_FORCE_BUILD="TRUE",
    )


def pip(arguments: list, total: int = 0, environment: "dict | None" = None) -> None:
    """Runs the environment's pip, tells how far it is (of ``total`` packages), on failure shows its end."""
    command = [str(VENV_PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    tail = collections.deque(maxlen=TAIL_LINES)  # type: collections.deque
    compiler = []  # its errors stand far above the end
    seen = 0
    with subprocess.Popen(command, cwd=str(ROOT), env=environment, universal_newlines=True, **OUTPUT) as process:
        for line in process.stdout:
            tail.append(line.rstrip()[:LINE_LENGTH])
            if COMPILER_ERROR.search(line) and len(compiler) < TAIL_LINES:
                compiler.append(line.strip()[:LINE_LENGTH])
            if line.startswith(("Collecting ", "Processing ", "Requirement already satisfied")):
                seen += 1
                if total and seen % 25 == 0:
                    say(f"  {seen} of {total} packages found")
            elif line.startswith("Installing collected packages") and total:
                say("  unpacking them (about a minute)")
    if process.returncode == 0:
        return
    print("\n".join(tail), file=sys.stderr)
    if any("No space left" in line for line in [*tail, *compiler]):
        fail("the disk is full (pip's last lines are above): make room and run `make setup` again.")
    if compiler:
        fail("a package could not be compiled:\n  " + "\n  ".join(compiler))
    fail(
        "pip failed (its last lines are above): if it was the network, run `make setup` again; "
        "packages that were downloaded are not downloaded twice."
    )


def install_lock(extras: str) -> None:
    """Exactly the packages of the lock, and the project."""
    pins = read_pins(LOCKS[extras])
    apart = COMPILED if extras == "gpu" else COMPILED | {"torch"}  # gpu.lock has the libraries of torch
    ready = {name: pin for name, pin in pins.items() if name not in apart}
    chosen = VENV / "pins.txt"
    chosen.write_text("".join(pin + "\n" for pin in ready.values()))
    say(f"installing {len(ready)} packages of {LOCKS[extras].name} ({COSTS[extras]})")
    pip(["install", "--no-deps", "--requirement", str(chosen)], total=len(ready))
    if "torch" in pins and "torch" not in ready:
        install_torch(pins["torch"])
    if extras == "gpu":
        compile_packages(VENV)
    remove_unlocked(set(pins))
    say("installing miles_async (editable)")
    pip(["install", "--no-deps", "--no-build-isolation", "--editable", "."])


def compile_packages(venv: Path) -> None:
    """Compiles the packages of COMPILED in an environment with the others of gpu.lock."""
    complete_toolkit(venv)
    pins = read_pins(LOCKS["gpu"])
    for name in sorted(COMPILED):
        say(f"compiling {pins[name]} ({COMPILATION_COSTS})")
        command = ["--python", str(venv / "bin" / "python"), "install", "--no-deps", "--no-build-isolation"]
        pip([*command, pins[name]], environment=build_environment(venv))


def install_torch(pin: str) -> None:
    """
    Installs torch for CPU: the build that pip's settings offer if it needs no CUDA libraries, else PyTorch's own CPU
    build, else the CUDA build with the libraries that it declares. A build that loads is kept.
    """
    if installed_torch() == pin.partition("==")[2]:
        return
    if not served_libraries(pin):
        pip(["install", "--no-deps", pin])
        return
    say(f"pip's index has the CUDA build of {pin}: asking PyTorch's index for the CPU build")
    command = [str(VENV_PYTHON), "-m", "uv", "pip", "install", "--python", str(VENV_PYTHON)]
    command += ["--no-deps", "--reinstall-package", "torch", "--torch-backend=cpu", pin]
    if subprocess.run(command, universal_newlines=True, **OUTPUT).returncode == 0:
        say(f"installed the CPU build of {pin}")
        return
    say(f"PyTorch's index cannot be reached: installing the CUDA build with its libraries ({CUDA_TORCH_COSTS})")
    free = shutil.disk_usage(str(ROOT)).free / 2**30
    if free < CUDA_TORCH_GIB:
        fail(
            f"{free:.1f} GiB are free at {ROOT}, but the CUDA build of torch needs about {CUDA_TORCH_GIB} GiB: make "
            "room, or set PIP_EXTRA_INDEX_URL to an index that has a CPU build, and run `make setup` again."
        )
    pip(["install", "--constraint", str(VENV / "pins.txt"), pin])


def installed_torch() -> str:
    """Version of the environment's torch, without the suffix of its build; empty if it cannot be imported."""
    done = subprocess.run([str(VENV_PYTHON), "-c", "import torch; print(torch.__version__)"], **TORCH_OUTPUT)
    return done.stdout.strip().splitlines()[-1].partition("+")[0] if done.returncode == 0 else ""


def served_libraries(pin: str) -> list:
    """CUDA libraries declared by the build that pip would install; read from metadata, before any download."""
    report = VENV / "torch-report.json"
    pip(["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report), pin])
    return cuda_libraries(json.loads(report.read_text())["install"][0]["metadata"])


def cuda_libraries(metadata: dict) -> list:
    """CUDA libraries that a build of torch declares in its metadata."""
    declared = metadata.get("requires_dist", [])
    return [name for name in declared if "extra ==" not in name and name.startswith(CUDA_LIBRARIES)]


def remove_unlocked(locked: set) -> None:
    """
    Uninstalls packages that an older lock, or somebody, has left in the environment. Libraries of a CUDA build of
    torch stay: the lock for CPU does not name them.
    """
    code = "import importlib.metadata as m; print(*(d.metadata['Name'] for d in m.distributions()))"
    names = subprocess.check_output([str(VENV_PYTHON), "-c", code], universal_newlines=True).split()
    leftover = {canonical(name) for name in names} - locked - NOT_LOCKED
    libraries = {name for name in leftover if name.startswith(CUDA_LIBRARIES)}
    if libraries and uses_cuda_libraries():
        leftover -= libraries
    leftover = sorted(leftover)
    if leftover:
        say("removing what is not in the lock: " + ", ".join(leftover))
        pip(["uninstall", "--yes", *leftover])


def uses_cuda_libraries() -> bool:
    """Whether the environment's torch is a CUDA build."""
    code = (
        "import importlib.metadata as m, sys; "
        f"sys.exit(not any(line.startswith({CUDA_LIBRARIES!r}) for line in m.requires('torch') or []))"
    )
    return subprocess.run([str(VENV_PYTHON), "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def check_torch() -> None:
    """Fails with the reason when torch cannot be imported."""
    done = subprocess.run([str(VENV_PYTHON), "-c", "import torch"], universal_newlines=True, **OUTPUT)
    if done.returncode:
        print(done.stdout.strip(), file=sys.stderr)
        fail(
            "torch is installed but cannot be imported (see above): remove .venv and run `make setup` again; if it "
            "fails in the same way, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds "
            "(https://download.pytorch.org/whl/cpu) and repeat."
        )


def read_stamp() -> list:
    """The extras and the fingerprint of the last set-up that finished."""
    return STAMP.read_text().splitlines() if STAMP.exists() else ["", ""]


def is_current(asked: str) -> bool:
    had_extras, had_fingerprint = read_stamp()
    return had_fingerprint == fingerprint(asked or had_extras) and VENV_PYTHON.exists()


@contextlib.contextmanager
def alone() -> "typing.Iterator[None]":
    """Two set-ups of one environment would break each other: wait for the other one."""
    directory = os.open(str(VENV.parent), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another one works on %s: waiting for it" % VENV)
        fcntl.flock(directory, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default="", help="'gpu' on a GPU machine; kept until .venv is removed")
    parser.add_argument("--compile", metavar="VENV", help="only compile, in an environment with the rest of gpu.lock")
    options = parser.parse_args()
    if options.compile:
        check_compilation()
        compile_packages(Path(options.compile).resolve())
        return
    asked = options.extras
    if asked not in LOCKS:
        fail(f"there are no extras named '{asked}': EXTRAS can be gpu.")

    if not is_current(asked):
        with alone():
            set_up(asked)


def set_up(asked: str) -> None:
    if is_current(asked):  # another one made it
        return
    extras = asked or read_stamp()[0]
    wanted = fingerprint(extras)
    started = time.monotonic()
    check_machine(extras)
    if not environment_is_usable():
        create_environment()
    # No fingerprint yet: an interrupted set-up is taken up again, never taken for a finished one.
    STAMP.write_text(extras + "\n\n")
    install_lock(extras)
    check_torch()
    STAMP.write_text(extras + "\n" + wanted + "\n")
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted: `make setup` takes it up where it was left.")
