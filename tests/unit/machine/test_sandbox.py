"""What the sandbox can enforce is found out by running a program in it."""

from __future__ import annotations

import pytest

from miles_async.errors import ServiceUnavailableError
from miles_async.machine import sandbox
from miles_async.machine.sandbox import sandbox_findings
from miles_async.rewards import confinement
from miles_async.rewards.confinement import landlock_version


def test_a_program_is_confined_here_as_far_as_the_kernel_lets_it() -> None:
    [finding] = sandbox_findings()
    assert finding.verdict == ("ok" if landlock_version() else "warning")


def test_without_landlock_programs_read_what_the_user_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: 0)
    [finding] = sandbox_findings()
    assert finding.verdict == "warning"
    assert finding.found.startswith("seccomp alone")
    assert "lsm=landlock" in finding.mend


def test_a_container_that_forbids_seccomp_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> str:
        raise ServiceUnavailableError("the sandbox for code cannot be set up: no seccomp")

    monkeypatch.setattr(sandbox, "run_program", refused)
    [finding] = sandbox_findings()
    assert finding.verdict == "warning"
    assert finding.found == "the sandbox for code cannot be set up: no seccomp"
    assert "seccomp=unconfined" in finding.mend


def test_a_machine_of_another_kind_cannot_confine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "ARCHITECTURES", {"s390x": (0, 0)})
    [finding] = sandbox_findings()
    assert finding.verdict == "warning"
    assert "cannot be confined on" in finding.found
    assert "--reward-sandbox off" in finding.mend
