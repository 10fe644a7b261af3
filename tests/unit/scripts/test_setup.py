"""The environment is the one that the lock describes, and a set-up that cannot work says why in one sentence."""

from __future__ import annotations

import ast
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
CPU_LOCK, GPU_LOCK, DOCS_LOCK, EXTRAS_LOCK = "requirements.lock", "gpu.lock", "docs.lock", "extras.lock"
CUDA_PACKAGE = re.compile(r"triton.*|nvidia-.*|cuda-.*")


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/setup_env.py, working on an environment of its own in an empty folder."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "setup_env", raising=False)
    import setup_env as module

    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "VENV_PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "setup-stamp")
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    return module


def make_venv_python(setup_env: ModuleType, script: str) -> None:
    """Stands in for the environment's Python, hence for its pip: a shell script."""
    make_program(setup_env.VENV_PYTHON, script)


def make_program(path: Path, script: str = "") -> None:
    """A shell script."""
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def leave_free(gib: int, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the disk has this much room."""
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _: SimpleNamespace(free=gib * 2**30))


def read_requirements(name: str) -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in (REQUIREMENTS / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def installed_lock() -> str:
    """Which lock .venv was made from."""
    stamp = ROOT / ".venv" / "setup-stamp"
    return GPU_LOCK if stamp.exists() and stamp.read_text().startswith("gpu") else CPU_LOCK


def locked_versions(lock: str) -> dict[str, Version]:
    pins = read_requirements(lock)
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------ the lock


def test_installed_environment_is_what_is_locked() -> None:
    installed = {
        canonicalize_name(distribution.metadata["Name"]): Version(Version(distribution.version).public)
        for distribution in importlib.metadata.distributions(path=[str(path) for path in site_packages()])
    }
    for name in ("pip", "miles-async"):
        installed.pop(name, None)
    if has_cuda_build():  # of torch, whose libraries the lock for CPU does not name
        installed = {name: version for name, version in installed.items() if not CUDA_PACKAGE.fullmatch(name)}
    assert installed == locked_versions(installed_lock()), "run `make setup`"


def has_cuda_build() -> bool:
    return any(CUDA_PACKAGE.match(line) for line in importlib.metadata.requires("torch") or [])


@pytest.mark.skipif(installed_lock() != CPU_LOCK, reason="known_pip_check.txt is about requirements.lock")
def test_pip_check_has_only_the_known_complaints() -> None:
    complaints = sorted(pip("check").stdout.replace("+cpu", "").splitlines())
    known = (REQUIREMENTS / "known_pip_check.txt").read_text().splitlines()
    if has_cuda_build():  # which brings some of what is missing on CPU
        missing = re.compile(rf"\S+ \S+ requires ({CUDA_PACKAGE.pattern}), which is not installed\.")
        complaints, known = ([each for each in lines if not missing.fullmatch(each)] for lines in (complaints, known))
    assert complaints == known, "if intended: store the sorted output of `.venv/bin/pip check`, without '+cpu'"


def site_packages() -> list[Path]:
    return [Path(path) for path in sys.path if path.endswith("site-packages")]


@pytest.mark.parametrize(
    ("lock", "sources"),
    [
        (CPU_LOCK, ("base.in", "cpu.in", "dev.in", "nodeps.in")),
        (GPU_LOCK, ("base.in", "gpu.in", "dev.in", "nodeps.in")),
        (DOCS_LOCK, ("docs.in",)),
        (EXTRAS_LOCK, ("mlflow.in", "trackio.in", "swanlab.in")),
    ],
)
def test_lock_satisfies_every_source(lock: str, sources: Sequence[str]) -> None:
    locked = locked_versions(lock)
    for source in sources:
        for requirement in read_requirements(source):
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{source}: {requirement} is not in {lock}: run `make lock`"
            assert version in requirement.specifier, f"{source}: {requirement}, locked {version}: run `make lock`"


def test_lock_holds_no_cuda_package() -> None:
    """Next to a CPU torch, torchvision and torchaudio break the imports of transformers."""
    refused = re.compile(r"torchvision|torchaudio|triton|nvidia-.*|cuda-.*")
    assert [name for name in locked_versions(CPU_LOCK) if refused.fullmatch(name)] == []


def test_locks_differ_only_in_what_gpu_in_replaces() -> None:
    """What is tested on CPU is what runs on GPUs."""
    cpu, gpu = locked_versions(CPU_LOCK), locked_versions(GPU_LOCK)
    replaced = {canonicalize_name(requirement.name) for requirement in read_requirements("gpu.in")}
    assert {name: version for name, version in gpu.items() if name in cpu and name not in replaced} == {
        name: version for name, version in cpu.items() if name not in replaced
    }, "run `make lock`"


def test_gpu_lock_has_one_cuda_and_one_transformer_engine() -> None:
    locked = locked_versions(GPU_LOCK)
    cuda = json.loads((REQUIREMENTS / "platform.json").read_text())["variable"]["CUDA_VERSION"]["default"]
    major, minor = cuda.split(".")
    runtime = locked["nvidia-cuda-runtime"]  # of torch; Transformer Engine is compiled against it
    assert (str(runtime.major), str(runtime.minor)) == (major, minor)
    for compiler in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"):  # a newer one refuses the headers
        assert (locked[compiler].major, locked[compiler].minor) == (int(major), int(minor)), compiler
    parts = {name: version for name, version in locked.items() if name.startswith("transformer-engine")}
    assert set(parts) == {"transformer-engine", f"transformer-engine-cu{major}", "transformer-engine-torch"}
    assert len(set(parts.values())) == 1


def test_what_is_compiled_is_told_to_the_resolver(setup_env: ModuleType) -> None:
    """uv would have to compile it to learn what it needs, and pip builds it apart from the others."""
    settings = tomllib.loads((REQUIREMENTS / "uv.toml").read_text())
    described = {entry["name"] for entry in settings["dependency-metadata"]}
    assert described == setup_env.COMPILED
    assert described <= set(settings["pip"]["no-binary"])
    locked = locked_versions(GPU_LOCK)
    for entry in settings["dependency-metadata"]:
        for requirement in map(Requirement, entry["requires-dist"]):
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def test_gpu_extras_have_the_engine_of_the_lock() -> None:
    gpu, without_dependencies = (
        next(requirement for requirement in read_requirements(source) if requirement.name == "sglang")
        for source in ("gpu.in", "nodeps.in")
    )
    assert gpu.specifier == without_dependencies.specifier


@pytest.fixture
def make_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/make_lock.py with four small locks; its resolvers answer with the constraints that they are given."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "make_lock", raising=False)
    import make_lock as module

    locks = {"": tmp_path / CPU_LOCK, "gpu": tmp_path / GPU_LOCK, "docs": tmp_path / DOCS_LOCK}
    locks[""].write_text("numpy==2.4.6\nrich==15.0.0\n")
    locks["gpu"].write_text("numpy==2.3.5\nrich==14.0.0\ntriton==3.8.0\n")
    locks["docs"].write_text("mkdocs==1.6.1\n")
    locks["extras"] = tmp_path / EXTRAS_LOCK
    locks["extras"].write_text("numpy==2.3.5\nrich==15.0.0\n")
    (tmp_path / "none.in").touch()
    monkeypatch.setattr(module, "LOCKS", locks)
    monkeypatch.setattr(module, "WITHOUT_DEPENDENCIES", tmp_path / "none.in")
    for resolver in ("resolve_for_cpu", "resolve_for_gpus", "resolve_for_docs", "resolve_for_extras"):
        monkeypatch.setattr(module, resolver, lambda constraints: constraints.read_text().split())
    return module


def test_pins_for_gpus_follow_those_for_cpu_and_the_others_stay(
    make_lock: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_lock.py"])
    make_lock.main()
    pins = [line for line in make_lock.LOCKS["gpu"].read_text().splitlines() if not line.startswith("#")]
    assert pins == ["numpy==2.3.5", "rich==15.0.0", "triton==3.8.0"]


def test_pins_for_extras_stay_or_follow_those_for_cpu(make_lock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy is one that an extra takes back."""
    monkeypatch.setattr(make_lock, "resolve_for_cpu", lambda _: ["numpy==2.4.7", "rich==15.0.1"])
    monkeypatch.setattr(sys, "argv", ["make_lock.py", "--upgrade", "rich"])
    make_lock.main()
    pins = [line for line in make_lock.LOCKS["extras"].read_text().splitlines() if not line.startswith("#")]
    assert pins == ["numpy==2.3.5", "rich==15.0.1"]


def test_a_check_of_locks_writes_nothing_and_fails_when_they_are_not_current(
    make_lock: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [lock.read_text() for lock in make_lock.LOCKS.values()]
    monkeypatch.setattr(sys, "argv", ["make_lock.py", "--check"])
    with pytest.raises(SystemExit, match="found the changes above: run `make lock`"):
        make_lock.main()
    assert "gpu.lock: rich==14.0.0 → rich==15.0.0" in capsys.readouterr().out
    assert [lock.read_text() for lock in make_lock.LOCKS.values()] == before

    make_lock.LOCKS["gpu"].write_text(before[1].replace("14", "15"))
    make_lock.main()


# ---------------------------------------------------------------------------------------------- the set-up


def test_set_up_script_is_readable_by_old_pythons() -> None:
    ast.parse((ROOT / "scripts" / "setup_env.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("extras", ["", "gpu"])
def test_current_environment_is_left_alone(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, extras: str) -> None:
    """With its extras too, which later commands (`make test`) don't name."""
    make_venv_python(setup_env, "exit 1")
    setup_env.STAMP.write_text(extras + "\n" + setup_env.fingerprint(extras) + "\n")
    monkeypatch.setattr(setup_env, "check_machine", lambda extras: pytest.fail("a set-up was started"))
    setup_env.main()


def test_changed_sources_start_a_set_up(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    make_venv_python(setup_env, "exit 1")
    setup_env.STAMP.write_text("\n" + "fingerprint of an older lock" + "\n")
    monkeypatch.setattr(setup_env, "check_machine", lambda extras: sys.exit("a set-up was started"))
    with pytest.raises(SystemExit, match="a set-up was started"):
        setup_env.main()


def test_a_set_up_waits_for_another_one_of_the_same_environment(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(setup_env.VENV.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def say(message: str) -> None:
        assert message == f"another one works on {setup_env.VENV}: waiting for it"
        make_venv_python(setup_env, "")
        setup_env.STAMP.write_text("\n" + setup_env.fingerprint("") + "\n")
        threading.Timer(0.3, finish).start()

    def finish() -> None:
        ended.append(True)
        os.close(other)

    ended: list[bool] = []
    monkeypatch.setattr(setup_env, "say", say)
    monkeypatch.setattr(setup_env, "check_machine", lambda extras: pytest.fail("a set-up was started"))
    setup_env.main()
    assert ended, "it did not wait"


def test_interrupted_set_up_is_not_taken_for_a_finished_one(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_venv_python(setup_env, "echo 'ERROR: cut off'; exit 1")
    setup_env.STAMP.write_text("\n" + "an older fingerprint" + "\n")
    monkeypatch.setattr(setup_env, "environment_is_usable", lambda: True)
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip failed"):
            setup_env.main()


def test_failed_download_shows_the_end_of_pip_and_the_way_on(
    setup_env: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    make_venv_python(setup_env, "seq 100; echo 'ERROR: connection reset'; exit 1")
    with pytest.raises(SystemExit, match="run `make setup` again"):
        setup_env.pip(["install", "anything"])
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "ERROR: connection reset"
    assert len(shown) == setup_env.TAIL_LINES


def test_disk_that_fills_up_is_named(setup_env: ModuleType) -> None:
    make_venv_python(setup_env, "echo 'ERROR: [Errno 28] No space left on device'; exit 1")
    with pytest.raises(SystemExit, match="the disk is full"):
        setup_env.pip(["install", "anything"])


def test_disk_that_is_too_small_is_refused(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(1, setup_env, monkeypatch)
    with pytest.raises(SystemExit, match=r"1\.0 GiB are free .* needs about 4 GiB"):
        setup_env.check_machine("")
    with pytest.raises(SystemExit, match=r"needs about 40 GiB"):
        setup_env.check_machine("gpu")


def test_other_python_is_refused(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit, match=r"Python [\d.]+ is needed, but .* is 3\.9\.18"):
        setup_env.check_machine("")


@pytest.mark.parametrize("place", ["bin/{}", ".pyenv/versions/{}.9/bin/python"])
def test_python_is_found_on_path_and_among_those_of_pyenv(tmp_path: Path, setup_env: ModuleType, place: str) -> None:
    version = setup_env.PYTHON.removeprefix("python")
    python = tmp_path / place.format(setup_env.PYTHON if place.startswith("bin") else version)
    make_program(python)  # takes every question for answered
    assert find_python(tmp_path).stdout.strip() == str(python)


def test_python_is_found_in_the_pyenv_of_another_user(tmp_path: Path, setup_env: ModuleType) -> None:
    """Whose ``pyenv``, or shim of python3, is on PATH."""
    version = setup_env.PYTHON.removeprefix("python")
    python = tmp_path / "versions" / f"{version}.9" / "bin" / "python"
    for program in (python, tmp_path / "bin" / "pyenv"):
        make_program(program)
    assert find_python(tmp_path).stdout.strip() == str(python)


def test_absent_python_is_named_with_how_to_get_it(tmp_path: Path, setup_env: ModuleType) -> None:
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert f"apt-get install {setup_env.PYTHON} {setup_env.PYTHON}-venv" in found.stderr
    assert " at /absent: " in find_python(tmp_path, PYTHON="/absent").stderr


def find_python(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Look on a machine whose programs are in ``home``/bin, and the few that the script takes from /bin."""
    tools = home / "bin"
    tools.mkdir(exist_ok=True)
    for name in {"dirname", "sed"} - {path.name for path in tools.iterdir()}:
        (tools / name).symlink_to(str(shutil.which(name)))
    environment |= {"PATH": str(tools), "HOME": str(home)}
    command = ["/bin/sh", str(ROOT / "scripts" / "find_python.sh")]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_missing_venv_module_is_named(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match=f"apt-get install {setup_env.PYTHON}-venv"):
        setup_env.check_machine("")


@pytest.fixture
def gpu_machine(setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that can build for GPUs, without a CUDA toolkit; returns the folder of its Python's headers."""
    programs, headers = tmp_path / "bin", tmp_path / "include"
    for path in (programs / "c++", headers / "Python.h"):
        path.parent.mkdir()
        path.touch(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(setup_env.sysconfig, "get_paths", lambda: {"include": str(headers)})
    leave_free(1024, setup_env, monkeypatch)
    return headers


def test_a_machine_without_a_toolkit_builds_for_gpus(setup_env: ModuleType, gpu_machine: Path) -> None:
    setup_env.check_machine("gpu")


def test_a_missing_compiler_matters_on_gpu_machines_only(
    setup_env: ModuleType, gpu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(gpu_machine))
    setup_env.check_machine("")
    with pytest.raises(SystemExit, match=r"- there is no C\+\+ compiler on PATH: apt-get install g\+\+"):
        setup_env.check_machine("gpu")


def test_missing_headers_of_python_are_named(setup_env: ModuleType, gpu_machine: Path) -> None:
    """Debian ships them apart."""
    (gpu_machine / "Python.h").unlink()
    with pytest.raises(SystemExit, match=rf"there is no .*/Python\.h: apt-get install {setup_env.PYTHON}-dev"):
        setup_env.check_machine("gpu")


@pytest.mark.parametrize(("found", "accepted"), [("glibc 2.34", True), ("glibc 2.31", False), (None, False)])
def test_an_old_c_library_is_refused(
    setup_env: ModuleType, gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, accepted: bool
) -> None:
    monkeypatch.setattr(setup_env.os, "confstr", lambda name: found)
    if accepted:
        setup_env.check_machine("gpu")
        return
    with pytest.raises(SystemExit, match=r"the C library is (glibc 2\.31|none), and wheels for GPUs need glibc 2\.34"):
        setup_env.check_machine("gpu")


BUILD = """
  error: subprocess-exited-with-error
  [400 lines of output]
    /site-packages/torch/include/c10/cuda/CUDAStream.h:3:10: fatal error: cuda_runtime_api.h: No such file or directory
        3 | #include <cuda_runtime_api.h>
    compilation terminated.
{}
  RuntimeError: Error compiling objects for extension
  ERROR: Failed building wheel for transformer_engine_torch
"""


def test_a_failed_compilation_shows_the_compilers_error(setup_env: ModuleType, tmp_path: Path) -> None:
    """It stands hundreds of lines above the end, and the network has nothing to do with it."""
    (tmp_path / "output").write_text(BUILD.format("    File setup.py, line 9\n" * 300))
    make_venv_python(setup_env, f"cat {tmp_path / 'output'}; exit 1")
    with pytest.raises(SystemExit) as refused:
        setup_env.pip(["install", "anything"])
    message = str(refused.value)
    assert "a package could not be compiled" in message
    assert "CUDAStream.h:3:10: fatal error: cuda_runtime_api.h: No such file" in message
    assert "network" not in message
    assert "subprocess-exited" not in message


def test_gpu_packages_are_those_of_their_lock_and_transformer_engine_is_compiled_after_torch(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = setup_env.nvidia_packages(setup_env.VENV) / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").write_text("the runtime")
    calls: list[list[str]] = []
    environments: list[dict[str, str] | None] = []

    def pip(arguments: list[str], total: int = 0, environment: dict[str, str] | None = None) -> None:
        calls.append(arguments)
        environments.append(environment)

    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setattr(setup_env, "remove_unlocked", lambda locked: None)
    for name in ("CUDNN_HOME", "CUDA_HOME", "CPATH"):
        monkeypatch.setenv(name, "/mine")
    setup_env.install_lock("gpu")
    pins = (setup_env.VENV / "pins.txt").read_text().split()
    locked = locked_versions(GPU_LOCK)
    assert f"torch=={locked['torch']}" in pins
    assert len(pins) == len(locked) - 1
    assert [call[-1] for call in calls] == [
        str(setup_env.VENV / "pins.txt"),
        f"transformer-engine-torch=={locked['transformer-engine-torch']}",
        ".",
    ]
    assert all("--no-deps" in call for call in calls)
    assert ["--no-build-isolation" in call for call in calls] == [False, True, True]
    [build] = filter(None, environments)
    assert build["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE", "no download that waits without an end"
    nvidia = setup_env.VENV / "lib" / setup_env.PYTHON / "site-packages/nvidia"
    assert build["CUDA_HOME"] == str(nvidia / "cu13"), "torch's version, whatever toolkit the machine has"
    assert build["CUDNN_HOME"] == build["CUDNN_PATH"] == str(nvidia / "cudnn"), "the one that torch loads"
    assert build["CPATH"] == f"{nvidia / 'cudnn/include'}:{nvidia / 'nccl/include'}:/mine", "the build names neither"
    assert build["PATH"] == f"{setup_env.VENV / 'bin'}:{os.environ['PATH']}", "ninja is there"
    assert build["HOME"] == os.environ["HOME"], "the rest is the machine's"
    assert (nvidia / "cu13/lib64/libcudart.so").read_text() == "the runtime", "what is compiled at run time links so"
    setup_env.complete_toolkit(setup_env.VENV)  # of a set-up that was interrupted


class TorchInstall:
    """Runs ``install_torch`` with an index, PyTorch's CPU index and an environment that are all stand-ins."""

    CUDA_BUILD = ("sympy>=1.13.3", "nvidia-cudnn-cu13==9.20.0.48", 'optree>=0.13.0; extra == "optree"')
    CPU_BUILD = ("sympy>=1.13.3", 'triton>=3; extra == "compile"')

    def __init__(self, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setup_env, self.monkeypatch = setup_env, monkeypatch
        self.calls: list[list[str]] = []
        self.requires: Sequence[str] = self.CUDA_BUILD
        self.loads = ""
        self.cpu_index_answers = False
        setup_env.VENV.mkdir()
        monkeypatch.setattr(setup_env, "pip", self._pip)
        monkeypatch.setattr(setup_env, "installed_torch", lambda: self.loads)
        monkeypatch.setattr(setup_env.subprocess, "run", self._uv)

    def _pip(self, arguments: list[str], total: int = 0) -> None:
        if "--report" in arguments:
            report = {"install": [{"metadata": {"requires_dist": list(self.requires)}}]}
            Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
        else:
            self.calls.append(arguments)

    def _uv(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command[1:])
        return subprocess.CompletedProcess(command, 0 if self.cpu_index_answers else 2)

    def __call__(self) -> list[list[str]]:
        self.setup_env.install_torch("torch==2.13.0")
        return self.calls


@pytest.fixture
def torch_install(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> TorchInstall:
    return TorchInstall(setup_env, monkeypatch)


def test_a_cpu_build_that_pip_offers_is_installed_alone(torch_install: TorchInstall) -> None:
    torch_install.requires = torch_install.CPU_BUILD
    assert torch_install() == [["install", "--no-deps", "torch==2.13.0"]]


def test_where_pip_offers_a_cuda_build_the_cpu_build_comes_from_pytorchs_index(torch_install: TorchInstall) -> None:
    torch_install.cpu_index_answers = True
    ((*_, backend, pin),) = torch_install()
    assert (backend, pin) == ("--torch-backend=cpu", "torch==2.13.0")


def test_without_pytorchs_index_the_cuda_build_comes_with_its_libraries_and_says_what_it_costs(
    torch_install: TorchInstall, setup_env: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, last = torch_install()
    assert last == ["install", "--constraint", str(setup_env.VENV / "pins.txt"), "torch==2.13.0"]
    assert setup_env.CUDA_TORCH_COSTS in capsys.readouterr().out


def test_a_full_disk_is_named_before_the_cuda_build_is_downloaded(
    torch_install: TorchInstall, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(4, setup_env, monkeypatch)
    with pytest.raises(SystemExit, match="PIP_EXTRA_INDEX_URL"):
        torch_install()
    assert not any("--constraint" in call for call in torch_install.calls)


def test_a_torch_that_loads_is_kept(torch_install: TorchInstall) -> None:
    torch_install.loads = "2.13.0"
    assert torch_install() == []


@pytest.mark.parametrize(("cuda_build", "removed"), [(True, ["leftover"]), (False, ["leftover", "nvidia-nccl-cu13"])])
def test_libraries_of_a_cuda_build_stay(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, cuda_build: bool, removed: list[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(setup_env, "pip", lambda arguments, total=0: calls.append(arguments))
    monkeypatch.setattr(setup_env, "uses_cuda_libraries", lambda: cuda_build)
    monkeypatch.setattr(setup_env.subprocess, "check_output", lambda *_, **__: "torch leftover nvidia-nccl-cu13 pip")
    setup_env.remove_unlocked({"torch"})
    assert calls == [["uninstall", "--yes", *removed]]


def test_unknown_extras_are_refused(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--extras", "gpus"])
    with pytest.raises(SystemExit, match="'gpus': EXTRAS can be gpu"):
        setup_env.main()


def test_environment_that_is_half_made_or_was_moved_is_not_used(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_usable(venv: Path) -> bool:
        monkeypatch.setattr(setup_env, "VENV", venv)
        monkeypatch.setattr(setup_env, "VENV_PYTHON", venv / "bin" / "python")
        return setup_env.environment_is_usable()

    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
    assert is_usable(here)

    shutil.copytree(here, elsewhere, symlinks=True)
    assert not is_usable(elsewhere), "its scripts run the Python of the folder that they were made in"

    (here / "pyvenv.cfg").unlink()
    assert not is_usable(here), "without pyvenv.cfg its Python is the machine's own: pip would install there"


# ------------------------------------------------------------------------------- the commands, the package


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    shown = subprocess.run(["make", "--no-print-directory"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert re.findall(r"^ *make (\S+)", shown.stdout, re.MULTILINE) == targets


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes into the folder that it builds from."""
    tree = tmp_path_factory.mktemp("wheel")
    for name in ("arguments", "miles_async", "requirements"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    built = pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tree / "dist"), str(tree))
    assert built.returncode == 0, built.stderr
    (path,) = (tree / "dist").glob("miles_async-*.whl")
    return path


def test_wheel_holds_one_package_with_arguments_and_presets_inside(wheel: Path) -> None:  # covers: A10
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [*ROOT.glob("arguments/**/*.py"), *ROOT.glob("arguments/**/*.args")]
    expected = {f"miles_async/{path.relative_to(ROOT)}" for path in sources}
    tested = [*ROOT.glob("requirements/*.in"), ROOT / "requirements/platform.json"]
    expected |= {f"miles_async/machine/{path.relative_to(ROOT)}" for path in tested}
    page = [path for path in ROOT.glob("miles_async/watch/static/**/*") if path.is_file()]
    modules = [*ROOT.glob("miles_async/**/*.py"), *ROOT.glob("miles_async/observability/*.toml"), *page]
    assert packed == expected | {str(path.relative_to(ROOT)) for path in modules}


def test_an_installed_wheel_has_the_command_and_the_presets(wheel: Path, tmp_path: Path) -> None:
    """Away from the sources; release.yml does the same in an environment with nothing else in it."""
    installed = pip("install", "--no-deps", "--no-index", "--quiet", "--target", str(tmp_path / "clean"), str(wheel))
    assert installed.returncode == 0, installed.stderr

    def miles_async(*words: str) -> str:
        command = [sys.executable, str(tmp_path / "clean" / "bin" / "miles-async"), *words]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "clean")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--max-weight-staleness" in miles_async("train", "--help")
    model = ("--hf-checkpoint", "/models/Qwen3-4B", "--prompt-data", "/data/prompts.jsonl", "--rm-type", "math")
    assert "rollout-num-gpus = 4" in miles_async("train", "@preset:1x8", "@preset:qwen3-4b", *model, "--print-config")
    code = "import miles_async; print(miles_async.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": "clean"}, capture_output=True, text=True
    )
    assert shown.stdout.startswith(str(tmp_path)), "these were the sources, not the wheel"
