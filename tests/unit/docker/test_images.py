"""Files of images, without Docker: every source, argument and version is there, and scripts of the images run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pathspec
import pytest

from miles_async.backends.megatron.families.known import FAMILIES
from miles_async.runtime.processes.run_process import MARK, note_run_process, read_run_process
from miles_async.types import JsonObject

ROOT = Path(__file__).parents[3]
DOCKERFILE, FAMILY = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "family.Dockerfile"
BAKE: JsonObject = json.loads((ROOT / "docker" / "docker-bake.json").read_text())
PLATFORM: JsonObject = json.loads((ROOT / "requirements" / "platform.json").read_text())["variable"]
PREDEFINED = {"family.name", "family.types"}  # of the bake file's matrix


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and rest of each instruction; continued lines are joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def sent(source: str) -> list[str]:
    """Files of a source of COPY that .dockerignore lets through."""
    ignored = pathspec.PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text().splitlines())
    path = ROOT / source
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_symlink() or each.is_file()]
    return [name for each in files if not ignored.match_file(name := str(each.relative_to(ROOT)))]


def of_kind(path: Path, kind: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == kind]


def copied(path: Path) -> list[str]:
    """Sources of COPY in the tree."""
    return [word for rest in of_kind(path, "COPY") for word in rest.split()[:-1] if not word.startswith("--")]


def arguments_of(target: str) -> dict[str, str]:
    entry = BAKE["target"][target]
    inherited = [arguments_of(parent) for parent in entry.get("inherits", ())]
    return {name: value for each in [*inherited, entry.get("args", {})] for name, value in each.items()}


@pytest.mark.parametrize("path", [DOCKERFILE, FAMILY], ids=lambda path: path.name)
def test_every_source_exists_and_is_sent_to_the_builder(path: Path) -> None:
    for source in copied(path):
        assert sent(source), source
    assert not [name for name in sent("miles_async") if "__pycache__" in name]


@pytest.mark.parametrize(("path", "targets"), [(DOCKERFILE, ("cpu", "gpu")), (FAMILY, ("family",))])
def test_every_argument_has_a_value(path: Path, targets: tuple[str, ...]) -> None:
    declared = {argument.partition("=")[0] for argument in of_kind(path, "ARG")}
    for target in targets:
        assert declared == set(arguments_of(target)), target
        assert ROOT / BAKE["target"][target].get("dockerfile", "docker/Dockerfile") == path


@pytest.mark.parametrize("path", [DOCKERFILE, FAMILY], ids=lambda path: path.name)
def test_a_stage_declares_the_arguments_that_it_uses(path: Path) -> None:
    """It sees no others."""
    declared = {argument.partition("=")[0] for argument in of_kind(path, "ARG")}
    before_all, seen = set[str](), set[str]()
    for name, rest in instructions(path):
        if name == "ARG":
            seen.add(rest.partition("=")[0])
        elif name == "FROM":
            before_all, seen = before_all or seen, set()
        used = set(re.findall(r"\$\{(\w+)", rest)) & declared
        assert used <= (before_all if name == "FROM" else seen), (name, rest)


def test_variables_of_the_bake_file_have_values_and_versions_are_not_repeated() -> None:
    text = (ROOT / "docker" / "docker-bake.json").read_text()
    used = set(re.findall(r"\$\{([\w.]+)\}", text))
    assert used <= {*BAKE["variable"], *PLATFORM, *PREDEFINED}
    for name, entry in PLATFORM.items():
        version = entry["default"]
        for path in (DOCKERFILE, FAMILY, ROOT / "docker" / "docker-bake.json"):
            assert not re.search(rf"(?<![\w.]){re.escape(version)}(?![\w.])", path.read_text()), (name, path.name)
    # Of the machine below, and of packages.
    assert set(PLATFORM) - used == {"CUDA_VERSION", "DRIVER_VERSION", "GLIBC_VERSION"}


def test_versions_of_the_platform_are_those_of_the_packages() -> None:
    python = PLATFORM["PYTHON_VERSION"]["default"]
    assert f'requires-python = "=={python}.*"' in (ROOT / "pyproject.toml").read_text()
    cuda = PLATFORM["CUDA_VERSION"]["default"].split(".")[0]
    assert f"core_cu{cuda}" in (ROOT / "requirements" / "gpu.in").read_text()


def test_nobody_is_root_the_command_is_ours_and_health_is_looked_at() -> None:
    for path in (DOCKERFILE, FAMILY):
        assert of_kind(path, "USER")[-1] == "1000"
    last_stage = instructions(DOCKERFILE)[[name for name, _ in instructions(DOCKERFILE)].index("USER") :]
    assert last_stage[0] == ("USER", "1000")
    assert json.loads(of_kind(DOCKERFILE, "ENTRYPOINT")[0]) == ["tini", "--", "miles-async"]
    (health,) = of_kind(DOCKERFILE, "HEALTHCHECK")
    (script,) = json.loads(health.partition("CMD ")[2])
    assert script in copied(DOCKERFILE)
    assert (ROOT / script).stat().st_mode & 0o111


def test_a_release_has_a_tag_of_its_own_and_is_the_latest() -> None:
    for target in ("cpu", "gpu", "family"):
        version, latest = BAKE["target"][target]["tags"]
        assert version.startswith("${REGISTRY}:${VERSION}")
        assert latest == version.replace("${VERSION}", "latest")
    for group in BAKE["group"].values():
        assert set(group["targets"]) <= set(BAKE["target"])


def test_every_family_has_one_image() -> None:
    entries = BAKE["target"]["family"]["matrix"]["family"]
    types = [name for entry in entries for name in entry["types"].split()]
    assert sorted(types) == sorted(FAMILIES)
    assert BAKE["target"]["family"]["contexts"] == {"base": "target:gpu"}
    assert of_kind(FAMILY, "FROM") == ["base"]


def test_families_are_checked_against_the_trainer_and_the_installed_engine() -> None:
    def check(*types: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "docker/check_family.py", " ".join(types)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)

    done = check(*FAMILIES)
    assert done.returncode == 0, done.stderr
    done = check("qwen3", "mamba")
    assert done.returncode == 1
    assert done.stderr.startswith("error: mamba is not trained; the types that are: llama")


def test_the_package_is_set_up_from_what_was_copied_by_then(tmp_path: Path) -> None:
    """Before the sources: pyproject.toml reads no other file."""
    for kind, rest in instructions(DOCKERFILE):
        if kind == "RUN" and "setup_env.py" in rest:
            break
        if kind == "COPY":
            sources = [word for word in rest.split()[:-1] if not word.startswith("--")]
            for name in (name for source in sources for name in sent(source)):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / name)
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "Requires-Dist: megatron-core" in metadata.read_text()
    assert 'extra == "gpu"' in metadata.read_text()


def test_hadolint_looks_at_every_dockerfile_and_notices_a_mistake(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\t\$\(BIN\)/hadolint (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(line.split()) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docker").glob("*Dockerfile"))
    hadolint = str(Path(sys.executable).parent / "hadolint")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian:bookworm-slim\nRUN cd /tmp\nENTRYPOINT run this\n")
    done = subprocess.run([hadolint, str(wrong)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert {"DL3003", "DL3025"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("shell", [text for path in (DOCKERFILE, FAMILY) for text in of_kind(path, "RUN")])
def test_shell_is_well_formed(shell: str) -> None:
    assert subprocess.run(["bash", "-n"], input=shell, text=True).returncode == 0
    assert shell.count("apt-get install") == shell.count("--no-install-recommends")
    assert "apt-get" not in shell or "rm -rf /var/lib/apt/lists/*" in shell


def test_a_container_is_healthy_while_its_run_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "")
    command = tmp_path / "miles-async"
    status = f'case $1 in status) exec {sys.executable} -m miles_async "$@"; esac'
    command.write_text(f'#!/bin/sh\n{status}\necho "$@" >> "$(dirname "$0")/calls"\ntest -e "$2/answers"\n')
    command.chmod(0o755)
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def health() -> int:
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        environment = {**path, "MILES_ASYNC_RUN_DIR": str(run_dir)}
        return subprocess.run([ROOT / "docker" / "healthcheck.sh"], env=environment, timeout=60).returncode

    assert health() == 0  # a node of Ray's
    note_run_process(run_dir, tmp_path / "control")  # this process drives a run
    assert health() == 1
    (run_dir / "answers").touch()
    assert health() == 0
    assert (tmp_path / "calls").read_text() == f"scale {run_dir}\n" * 2
    (run_dir / "answers").unlink()
    over = msgspec.structs.replace(read_run_process(run_dir), start_ticks=1)
    for run in (over, msgspec.structs.replace(over, host="another")):  # what `miles-async watch` shows
        (run_dir / "run.json").write_bytes(msgspec.json.encode(run))
        assert health() == 0
