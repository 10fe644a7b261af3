"""The interpreter of Dockerfiles: what it understands, what it refuses, and what a step is given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import dockerfile

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/try_image.py"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_image

    return try_image


# ------------------------------------------------------------------------------------------- reading
def read(folder: Path, text: str) -> dockerfile.Dockerfile:
    path = folder / "Dockerfile"
    path.write_text(text)
    return dockerfile.read(path)


def test_continued_lines_are_one_instruction_and_comments_none(tmp_path: Path) -> None:
    file = read(tmp_path, "# one\nFROM a AS b\nRUN first \\\n    # why\n    && second\n\nCMD []\n")
    (stage,) = file.stages
    assert [(each.line, each.name, each.rest) for each in stage.steps] == [
        (3, "RUN", "first && second"),
        (7, "CMD", "[]"),
    ]


def test_stages_for_cpu_are_found_and_those_for_gpus_left_out() -> None:
    file = dockerfile.read(DOCKERFILE)
    base, stages = file.chain("image", {"MACHINE": "system", "DEBIAN_RELEASE": "bookworm"})
    assert (base, [stage.name for stage in stages]) == ("debian:bookworm-slim", ["system", "image"])
    _, stages = file.chain("image", {"MACHINE": "cuda", "DEBIAN_RELEASE": "bookworm"})
    assert [stage.name for stage in stages] == ["system", "cuda", "image"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a\nVOLUME /x\n", r"line 2: expected one of ADD, ARG, .*, found VOLUME"),
        ("RUN x\nFROM a\n", "line 1: expected ARG or FROM first, found RUN"),
        ("FROM --platform=x a\n", "line 1: expected FROM image"),
        ("FROM a\nRUN x \\\n", "line 2: expected another line"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(dockerfile.DockerfileError, match=message):
        read(tmp_path, text)


def test_what_dockerignore_names_is_not_sent(tmp_path: Path) -> None:
    """The last rule wins; a rule for a folder is one for all that it holds."""
    (tmp_path / ".dockerignore").write_text("# why\n*\n!kept\n**/__pycache__\nkept/*/*.jsonl\n")
    for name in ("kept/a.py", "kept/__pycache__/a.pyc", "kept/data/b.jsonl", "kept/data/deep/b.jsonl", "left/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "kept" / "link").symlink_to("../left")
    context = dockerfile.Context(tmp_path)
    assert context.files("kept") == ["kept/a.py", "kept/data/deep/b.jsonl", "kept/link"]
    with pytest.raises(dockerfile.DockerfileError, match="COPY left: expected files"):
        context.files("left")


# ------------------------------------------------------------------------------------------- executing
class Executed:
    """An image in a folder whose users are all ourselves; commands are recorded, not run."""

    def __init__(self, script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.tree = folder / "root", folder / "tree"
        (self.root / "etc").mkdir(parents=True)
        lines = [f"{name}:x:{os.getuid()}:{os.getgid()}::/home/{name}:/bin/sh\n" for name in ("root", "miles")]
        (self.root / "etc" / "passwd").write_text("".join(lines))
        (self.tree / "source").mkdir(parents=True)
        (self.tree / "source" / "a.py").write_text("a")
        (self.tree / "b.txt").write_text("b")
        (self.tree / ".dockerignore").touch()
        self.commands: list[str] = []
        self._read = script.read
        monkeypatch.setattr(script, "run", lambda command, limit: self.commands.append(command[-1]))
        self.image = script.Image(script.DebianRoot(self.root))
        pip = script.PipSettings({"PIP_TIMEOUT": "9"}, [])
        given = {"MACHINE": "system", "EXTRAS": "tiny"}
        self._builder = script.Builder(self.image, given, script.Context(self.tree), pip)

    def steps(self, text: str) -> None:
        path = self.tree / "Dockerfile"
        path.write_text("FROM base\n" + text)
        for step in self._read(path).stages[0].steps:
            self._builder.execute(step)


@pytest.fixture
def executed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executed:
    return Executed(script, tmp_path, monkeypatch)


def test_a_step_has_the_shell_user_folder_and_variables_of_its_place(executed: Executed) -> None:
    executed.steps(
        'SHELL ["/bin/bash", "-c"]\nARG EXTRAS\nARG OTHER=default\nENV A=1 PATH=/opt:${PATH}\n'
        "USER miles\nWORKDIR /opt/there\nRUN echo ${EXTRAS}\n"
    )
    (command,) = executed.commands
    assert command.endswith("/bin/bash -c 'echo ${EXTRAS}'")
    for word in ("--chdir=/opt/there", "HOME=/home/miles", "EXTRAS=tiny", "OTHER=default", "A=1", "PIP_TIMEOUT=9"):
        assert f" {word} " in command
    assert "PATH=/opt:/usr/local/sbin:" in command
    assert "--ignore-environment" in command
    assert (executed.root / "opt" / "there").is_dir()


def test_files_are_copied_as_the_builder_would(executed: Executed) -> None:
    executed.steps("WORKDIR /opt\nCOPY --chown=miles b.txt ./\nCOPY source there/\nCOPY source /abs\n")
    copied = sorted(str(path.relative_to(executed.root)) for path in executed.root.rglob("*") if path.is_file())
    assert copied == ["abs/a.py", "etc/passwd", "opt/b.txt", "opt/there/a.py"]


def test_what_docker_run_needs_is_remembered(executed: Executed) -> None:
    executed.steps('HEALTHCHECK --interval=60s CMD ["check"]\nENTRYPOINT ["tini", "--"]\nCMD ["--help"]\n')
    image: Any = executed.image
    assert (image.health, image.entry_point, image.words) == (["check"], ["tini", "--"], ["--help"])
    assert "PIP_TIMEOUT" not in image.command(["x"])[-1]  # a setting of the build


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("ADD https://example.org/x /x", "line 2: ADD can be read, but not executed"),
        ("COPY --from=other a b", "expected COPY --chown, found --from"),
        ("COPY b.txt source there", "expected a folder with / at its end, found there"),
        ("CMD run this", "expected CMD with a list as JSON"),
    ],
)
def test_what_cannot_be_executed_is_refused(script: ModuleType, executed: Executed, step: str, message: str) -> None:
    with pytest.raises(script.DockerfileError, match=message):
        executed.steps(step + "\n")


def test_settings_of_pip_come_along_with_the_folders_that_they_name(script: ModuleType, tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    settings = script.pip_settings(
        [
            ":env:.timeout='9'",
            f"global.extra-index-url='https://mirror.test/simple file://{index}'",
            f"global.find-links='{wheels}'",
            "global.timeout='30'",
        ]
    )
    seen = f"/mnt/machine{tmp_path}"
    assert settings.variables == {
        "PIP_EXTRA_INDEX_URL": f"https://mirror.test/simple file://{seen}/index/simple",
        "PIP_FIND_LINKS": f"{seen}/wheels",
        "PIP_TIMEOUT": "9",
    }
    assert settings.folders == [index.parent, wheels]
    assert script.build_arguments(settings)["PIP_EXTRA_INDEX_URL"] == settings.variables["PIP_EXTRA_INDEX_URL"]
    without = script.build_arguments(script.pip_settings([]))
    assert without["PIP_EXTRA_INDEX_URL"] == ""
    assert without["DEBIAN_RELEASE"] == "bookworm"


def test_every_instruction_of_the_stages_for_cpu_can_be_executed(
    script: ModuleType, executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the Dockerfile itself; nothing is installed."""
    monkeypatch.setattr(script.DebianRoot, "bootstrap", lambda *_: None)
    root = executed.image.root
    monkeypatch.setattr(type(root), "user", lambda *_: script.User(os.getuid(), os.getgid(), "/"))
    image = script.build(root, script.read(DOCKERFILE), script.pip_settings([]), "no mirror")
    assert (image.user, image.directory) == ("1000", "/opt/miles-async")
    assert len(executed.commands) == 2  # Debian's packages, and the environment
    for name in ("examples/quickstart/run.sh", "requirements/requirements.lock", "arguments/parser.py"):
        assert (executed.root / "opt/miles-async" / name).is_file()
    assert (executed.root / "opt/miles-async/miles_async/arguments").is_symlink()
    assert script.QUICK_START[0] in (ROOT / "docs" / "docker.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: expected debootstrap, unshare, nsenter, chroot, mount on PATH, found no debootstrap"),
        (["--folder", "/nonexistent"], "error: expected a folder for --folder, found /nonexistent, which is none"),
    ],
)
def test_what_cannot_begin_says_why_in_one_line(words: list[str], message: str) -> None:
    command = [sys.executable, "scripts/try_image.py", *words]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def test_a_step_that_fails_ends_it_and_leaves_no_folder(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], limit: float) -> None:
        raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr(script, "missing", lambda: "")
    monkeypatch.setattr(script.DebianRoot, "bootstrap", lambda root, *_: root.path.mkdir())
    monkeypatch.setattr(script.DebianRoot, "user", lambda *_: script.User(os.getuid(), os.getgid(), "/"))
    monkeypatch.setattr(script, "run", fail)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["try_image.py", "--folder", str(tmp_path)])
    assert script.main() == 1
    shown = capsys.readouterr()
    assert shown.err == "error: the last step above ended with 100\n"
    assert "==> line 13: RUN apt-get update" in shown.out
    assert list(tmp_path.iterdir()) == []


def test_all_that_a_command_started_ends_with_it(script: ModuleType) -> None:
    """Also what went on in the background: nobody is left who could write."""
    command = ["bash", "-c", "sleep 300 & echo started; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"started\n"
        script.end(process)
        assert process.stdout.read() == b""


def test_a_step_has_a_limit_of_time(script: ModuleType) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        script.run(["sleep", "300"], 0.01)
