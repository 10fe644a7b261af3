"""``miles-async completion``: what bash offers with its script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from miles_async.cli import COMMANDS, main
from tests.unit.commands.command_line import printed, refused


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "miles-async"
    path.write_text(capsys.readouterr().out)
    return path


def offered(script: Path, *words: str) -> set[str]:
    """What bash completes the last of ``words`` to, in the folder of ``script``."""
    line = ["miles-async", *words]
    typed = " ".join(f"'{word}'" for word in line)
    code = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_miles_async; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], cwd=script.parent, capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], set(COMMANDS)),
        (["pl"], {"plan"}),
        (["train", "--max-weight"], {"--max-weight-staleness"}),
        (["train", "--lr", "1", "--no-grpo"], {"--no-grpo-std-normalization"}),
        (["train", "--policy-loss", "dppo"], {"dppo_tv", "dppo_kl"}),
        (["train", "--help", "ro"], {"rollout"}),
        (["train", "--hf-checkpoint", "miles"], {"miles-async"}),
        (["ledger", "miles"], {"miles-async"}),
    ],
)
def test_bash_completes_commands_flags_choices_groups_and_paths(
    words: list[str], expected: set[str], script: Path
) -> None:
    assert offered(script, *words) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_a_script_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max-weight-staleness" in printed(capsys, "completion", shell)


def test_an_unknown_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "choose from bash" in refused(capsys, "completion", "dos").replace("'", "")
