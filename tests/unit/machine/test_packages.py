"""Installed versions are compared with those that were tested, as requirements/ names them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from miles_async.arguments.cluster import Device
from miles_async.machine import packages
from miles_async.machine.packages import installed_for, package_findings, platform_version, set_up, versions_tested

ROOT = Path(__file__).parents[3]


def test_what_was_tested_depends_on_the_device() -> None:
    cpu, gpu = versions_tested("cpu"), versions_tested("cuda")
    assert cpu["megatron-core"] == gpu["megatron-core"]
    assert cpu["sglang"] == gpu["sglang"]
    assert f"torch=={cpu['torch']}" in (ROOT / "requirements/cpu.in").read_text()
    assert f"torch=={gpu['torch']}" in (ROOT / "requirements/gpu.in").read_text()
    assert gpu["transformer-engine"] is None  # a range
    assert "transformer-engine" not in cpu


def test_the_environment_of_the_tests_is_the_tested_one() -> None:
    [finding] = package_findings(versions_tested("cpu"), "cpu")
    assert finding.verdict == "ok"
    assert "sglang" in finding.found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_package_that_only_tests_read_is_not_missed(device: Device) -> None:
    assert "trl==" in (ROOT / "requirements/nodeps.in").read_text()
    assert "trl" not in versions_tested(device)
    assert "xgrammar" in versions_tested(device)


def test_packages_for_gpus_on_a_machine_without_one_are_compared_with_their_own_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (installed_for("cpu"), installed_for("cuda")) == ("cpu", "cuda")
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "2.11.0")
    assert installed_for("cpu") == "cuda"


def test_missing_and_other_versions_are_named_with_the_command() -> None:
    installed = importlib.metadata.version("numpy")
    missing, other = package_findings({"no-such-package": "1.0", "numpy": "0.1", "msgspec": None}, "cuda")
    assert (missing.verdict, other.verdict) == ("failure", "warning")
    assert missing.found == "not installed: no-such-package"
    assert other.found.endswith(f": numpy {installed} (0.1)")
    assert missing.mend == other.mend == "make setup EXTRAS=gpu"


def test_a_wheel_names_its_own_files_since_it_has_no_makefile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "REQUIREMENTS", ROOT / "requirements")  # a folder, as in a wheel
    folder = ROOT / "requirements"
    assert set_up("cpu") == (
        f"pip install -r {folder}/base.in -r {folder}/cpu.in && pip install --no-deps -r {folder}/nodeps.in"
    )
    assert set_up("cuda") == "in a clone of the sources: make setup EXTRAS=gpu"


def test_a_local_version_is_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert [finding.verdict for finding in package_findings({"torch": "2.13.0"}, "cpu")] == ["ok"]


def test_versions_of_the_platform_are_read_from_the_repositorys_file() -> None:
    variables = json.loads((ROOT / "requirements/platform.json").read_text())["variable"]
    assert platform_version("DRIVER_VERSION") == variables["DRIVER_VERSION"]["default"]
