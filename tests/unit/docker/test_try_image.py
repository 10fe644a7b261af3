"""The build of the image for CPU: what the builder is given, what is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import try_image

ROOT = Path(__file__).parents[3]
FAKES = {
    "unshare": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "debootstrap": "#!/bin/sh\n",
    "buildah": '#!/bin/sh\necho "$@" >> "$CALLS"\ncase "$5" in build) exec BUILD ;; mount) echo "$TMPDIR" ;; esac\n',
}


def test_settings_of_pip_come_along_with_the_folders_that_they_name(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    settings, folders = try_image.pip_settings(
        [
            ":env:.timeout='9'",
            f"global.extra-index-url='https://mirror.test/simple file://{index}'",
            f"global.find-links='{wheels}'",
            "global.timeout='30'",
        ]
    )
    seen = f"/mnt/machine{tmp_path}"
    assert settings == {
        "extra-index-url": f"https://mirror.test/simple file://{seen}/index/simple",
        "find-links": f"{seen}/wheels",
        "timeout": "9",
    }
    assert folders == [index.parent, wheels]
    assert try_image.build_arguments(settings)["PIP_EXTRA_INDEX_URL"] == settings["extra-index-url"]
    without = try_image.build_arguments({})
    assert without["PIP_EXTRA_INDEX_URL"] == ""
    assert (without["UBUNTU_RELEASE"], without["MACHINE"]) == ("noble", "system")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: expected buildah, debootstrap, unshare on PATH, found no buildah, debootstrap, unshare"),
        (["--folder", "/nonexistent"], "error: expected a folder for --folder, found /nonexistent, which is none"),
    ],
)
def test_what_cannot_begin_says_why_in_one_line(words: list[str], message: str) -> None:
    command = [sys.executable, "scripts/try_image.py", *words]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def started(folder: Path, build: str) -> subprocess.Popen[str]:
    """The script with stand-ins for the commands that need root; ``build`` is what `buildah build` does."""
    commands, images = folder / "commands", folder / "images"
    commands.mkdir()
    images.mkdir()
    for name, text in FAKES.items():
        (commands / name).write_text(text.replace("BUILD", build))
        (commands / name).chmod(0o755)
    code = "import sys; from scripts import try_image as script; script.missing = str; sys.exit(script.main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--folder", str(images)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(folder / "calls")},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_step_that_fails_ends_it_and_leaves_no_folder(tmp_path: Path) -> None:
    process = started(tmp_path, "false")
    assert process.communicate(timeout=60)[1] == "error: the last step above ended with 1\n"
    assert process.returncode == 1
    assert list((tmp_path / "images").iterdir()) == []
    calls = (tmp_path / "calls").read_text()
    assert "--isolation chroot --format docker --pull-never --file" in calls
    assert f"--target image --tag {try_image.IMAGE} --build-arg UBUNTU_RELEASE=noble" in calls
    assert ":/etc/pip.conf:ro" in calls
    assert try_image.QUICK_START[0] in (ROOT / "docs" / "docker.md").read_text()


def test_a_signal_ends_all_that_it_started_and_leaves_no_folder(tmp_path: Path) -> None:
    process = started(tmp_path, "sleep 298")
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists() or " build " not in (tmp_path / "calls").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # returns when nobody holds its stderr any more
    assert process.returncode == 143
    assert list((tmp_path / "images").iterdir()) == []


def test_a_step_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_image, "STEP_LIMIT", 0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        try_image.run(["sleep", "300"])


def test_a_run_is_healthy_once_the_check_succeeds(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        (tmp_path / "run.json").write_text(json.dumps({}))
        assert try_image.wait_for_health(process, ["true"], tmp_path)
        process.kill()
        process.wait()
        assert not try_image.wait_for_health(process, ["true"], tmp_path)
