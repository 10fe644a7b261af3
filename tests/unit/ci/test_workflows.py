"""Workflows, owners and pre-commit: everything that they name exists.

GitHub's schema is checked by `make lint`; here is what it leaves open, such as expressions and limits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTEXTS = {"github", "matrix", "steps", "needs", "runner", "secrets", "fromJSON"}
HOSTED = {"ubuntu-24.04"}

Yaml = Mapping[str, Any]


class _Yaml12(yaml.SafeLoader):
    """YAML 1.2, as GitHub reads it: `on` is a word, not a truth value."""


_Yaml12.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(path: Path) -> Yaml:
    return yaml.load(path.read_text(), _Yaml12)


def jobs(workflow: Yaml) -> list[Yaml]:
    return list(workflow["jobs"].values())


def steps(workflow: Yaml) -> list[Yaml]:
    return [step for job in jobs(workflow) for step in job["steps"]]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.fixture(params=WORKFLOWS, ids=[path.name for path in WORKFLOWS])
def workflow(request: pytest.FixtureRequest) -> Yaml:
    return read(request.param)


def test_there_are_workflows_for_pushes_nights_gpus_and_tags() -> None:
    events = {path.name: set(read(path)["on"]) for path in WORKFLOWS}
    assert events == {
        "ci.yml": {"push", "pull_request"},
        "nightly.yml": {"schedule", "workflow_dispatch"},
        "e2e.yml": {"schedule", "workflow_dispatch", "pull_request"},
        "release.yml": {"push"},
    }


def test_jobs_have_a_limit_of_time_a_known_machine_and_no_more_rights_than_they_need(workflow: Yaml) -> None:
    assert set(workflow["permissions"]) == {"contents"}  # the token can do no more, but for publishing images
    for job in jobs(workflow):
        assert set(job.get("permissions", {})) <= {"contents", "packages"}
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        assert job["runs-on"] in HOSTED or job["runs-on"] == "${{ matrix.runner }}"
        needed = job.get("needs", [])
        assert {needed} if isinstance(needed, str) else set(needed) <= set(workflow["jobs"])
    for step in steps(workflow):
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"])


def test_expressions_are_closed_and_name_what_there_is(workflow: Yaml) -> None:
    for job in jobs(workflow):
        text = json.dumps(job)
        expressions = re.findall(r"\$\{\{ (.*?) \}\}", text)
        assert len(expressions) == text.count("${{")
        for expression in expressions:
            assert {word.split(".")[0] for word in re.findall(r"[a-zA-Z]\w*(?:\.[\w-]+)*", expression)} <= CONTEXTS
        wanted = set(re.findall(r"matrix\.(\w+)", text))
        given = job.get("strategy", {}).get("matrix", {})
        for entry in suite_matrix() if isinstance(given, str) else given.get("include", [{}]):
            assert wanted <= set(entry), entry
        ids = {step["id"] for step in job["steps"] if "id" in step}
        assert set(re.findall(r"steps\.(\w+)\.", text)) <= ids
        for needed, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", text):
            assert output in workflow["jobs"][needed]["outputs"]


def suite_matrix() -> list[Yaml]:
    done = subprocess.run(
        ["python", "scripts/suite.py", "matrix"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["include"]


def commands(workflow: Yaml) -> Iterator[str]:
    """Lines of shell, once per entry of a matrix."""
    for job in jobs(workflow):
        given = job.get("strategy", {}).get("matrix", {})
        for entry in suite_matrix() if isinstance(given, str) else given.get("include", [{}]):
            for step in job["steps"]:
                text = step.get("run", "")
                for key, value in entry.items():
                    text = text.replace(f"${{{{ matrix.{key} }}}}", str(value))
                yield from text.splitlines()


def test_scripts_targets_and_files_exist(workflow: Yaml) -> None:
    for line in commands(workflow):
        assert subprocess.run(["bash", "-n"], input=line, text=True).returncode == 0, line
        words = re.findall(r"[\w./-]+", line)
        for first, second in zip(words, [*words[1:], ""], strict=True):
            if first in ("make", ".ci/run"):
                assert second in make_targets(), line
            if re.match(r"(\.ci|scripts|requirements|docker|examples|tests)/", first):
                assert (ROOT / first).exists(), line
            if first.startswith(".venv/bin/"):
                assert first.removeprefix(".venv/bin/") in ("python", "pip", "miles-async"), line
    for step in steps(workflow):
        for key in ("python-version-file", "cache-dependency-path", "config"):
            assert (ROOT / step.get("with", {}).get(key, ".")).exists()


def test_the_interpreter_is_the_one_of_pyproject() -> None:
    """Of the workflows none names a version of its own."""
    assert not [path.name for path in WORKFLOWS if re.search(r"python-version:", path.read_text())]


# ------------------------------------------------------------------------------------------- owners, pre-commit
def owners() -> dict[str, list[str]]:
    lines = [line.split() for line in (ROOT / "CODEOWNERS").read_text().splitlines()]
    return {line[0]: line[1:] for line in lines if line and not line[0].startswith("#")}


def test_owners_are_named_for_what_there_is() -> None:
    for pattern, teams in owners().items():
        assert pattern == "*" or (ROOT / pattern.strip("/")).is_dir(), pattern
        assert pattern == "*" or (pattern.startswith("/") and pattern.endswith("/"))
        assert teams
        assert all(re.fullmatch(r"@miles-async/[a-z]+", team) for team in teams)


def test_every_room_has_an_owner() -> None:
    rooms = {f"/miles_async/{path.parent.name}/" for path in (ROOT / "miles_async").glob("*/__init__.py")}
    rooms -= {"/miles_async/arguments/"}  # a link to /arguments/
    assert rooms <= set(owners())
    assert next(iter(owners())) == "*"  # the last that matches decides


def test_pre_commit_runs_what_make_lint_and_typecheck_run() -> None:
    """On the files that changed, where `make lint` names all of them."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = "".join(re.findall(r"^(?:lint|typecheck):.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE))
    checks = set(re.findall(r"^\t\$\(BIN\)/([\w-]+(?: check| format)?)", recipes, flags=re.MULTILINE))
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    entries = {hook["entry"].removeprefix(".venv/bin/").partition(" --")[0] for hook in hooks}
    assert entries == checks
    assert all(hook["language"] == "system" for hook in hooks)  # the versions of the lock


@pytest.mark.parametrize(
    ("before", "after"),
    [("runs-on:", "run-on:"), ("timeout-minutes: ", "timeout-minutes: soon "), ("steps:", "step:"), ("on:", "when:")],
)
def test_a_workflow_that_github_would_refuse_fails_make_lint(tmp_path: Path, before: str, after: str) -> None:
    def is_accepted(text: str) -> bool:
        path = tmp_path / "nightly.yml"
        path.write_text(text)
        (line,) = re.findall(r"^\t\$\(BIN\)/(check-jsonschema .*) \S+$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        command = [str(Path(sys.executable).parent / line.split()[0]), *line.split()[1:], str(path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    good = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert is_accepted(good)
    assert not is_accepted(good.replace(before, after))
