"""End-to-end suites of .ci/suites.toml: list them for a matrix of runners, run one, judge a run by its bands.

    .venv/bin/python scripts/suite.py matrix                        JSON for GitHub's `strategy.matrix`
    .venv/bin/python scripts/suite.py run quickstart-cpu runs/e2e   the command, then its gates
    .venv/bin/python scripts/suite.py gate quickstart-cpu runs/e2e  the gates of a run that was

Exit status: 0 all is within its bands; 1 the run failed or left a band; 2 no such suite or run. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
SUITES = ROOT / ".ci" / "suites.toml"
SET_UP_MINUTES = 60  # of a runner, before the suite's own time; Transformer Engine is compiled
END_SECONDS = 120  # for a run that was told to end, before it is killed
PASSED, FAILED, WRONG = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A band for one metric."""

    metric: str
    step: int  # the last of the window, as metrics.jsonl counts
    low: float
    high: float
    window: int = 1
    of: Literal["mean", "max"] = "mean"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """An end-to-end run of CI."""

    gpus: int  # 0: any machine
    minutes: int
    command: tuple[str, ...]  # --run-dir is appended
    gates: tuple[Gate, ...]

    @property
    def extras(self) -> str:
        """EXTRAS of `make setup`."""
        return "gpu" if self.gpus else ""

    @property
    def runner(self) -> str | list[str]:
        """Labels of the machine, as `runs-on` takes them."""
        return ["self-hosted", f"gpu-{self.gpus}"] if self.gpus else "ubuntu-24.04"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A gate and what the run has for it."""

    what: str
    expected: str
    found: str
    passed: bool


def read_suites(path: Path = SUITES) -> dict[str, Suite]:
    """Suites by name. Raises TypeError for a key that there is not."""
    content: dict[str, Any] = tomllib.loads(path.read_text())
    return {
        name: Suite(**{**entry, "command": tuple(entry["command"]), "gates": tuple(Gate(**g) for g in entry["gates"])})
        for name, entry in content.items()
    }


def judge(gates: Sequence[Gate], metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Verdict]:
    """Judge a run by its end, its balance and its gates."""
    verdicts = [
        Verdict(what=name, expected=str(expected), found=str(found := summary.get(name)), passed=found == expected)
        for name, expected in (("ending", "finished"), ("balanced", True))
    ]
    return [*verdicts, *(_judge_gate(gate, metrics) for gate in gates)]


def _judge_gate(gate: Gate, metrics: Sequence[Mapping[str, Any]]) -> Verdict:
    steps = range(gate.step - gate.window + 1, gate.step + 1)
    values = [row[gate.metric] for row in metrics if gate.metric in row and row["step"] in steps]
    where = f"step {gate.step}" if gate.window == 1 else f"{gate.of} of steps {steps[0]}-{steps[-1]}"
    what, expected = f"{gate.metric}, {where}", f"{gate.low:g} to {gate.high:g}"
    if len(values) != gate.window:
        return Verdict(what=what, expected=expected, found=f"{len(values)} of {gate.window} values", passed=False)
    # max() passes over NaN, depending on where it is
    broken = any(value is None or not math.isfinite(value) for value in values)
    value = math.nan if broken else max(values) if gate.of == "max" else sum(values) / len(values)
    return Verdict(what=what, expected=expected, found=f"{value:.4g}", passed=gate.low <= value <= gate.high)


def report(name: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"### {name}: {'passed' if all(verdict.passed for verdict in verdicts) else 'FAILED'}"
    yield ""
    yield "| | expected | found | |"
    yield "|---|---|---|---|"
    for verdict in verdicts:
        yield f"| {verdict.what} | {verdict.expected} | {verdict.found} | {'ok' if verdict.passed else 'FAILED'} |"


def gate(name: str, suite: Suite, run_dir: Path) -> int:
    """Show the report, for GitHub's summary too and as report.md beside the run; return the exit status."""
    try:
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError) as error:
        print(f"error: {run_dir}: expected metrics.jsonl and summary.json of a run: {error}", file=sys.stderr)
        return WRONG
    verdicts = judge(suite.gates, metrics, summary)
    text = "\n".join(report(name, verdicts)) + "\n"
    print(text, end="")
    (run_dir / "report.md").write_text(text)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(page, "a") as file:
            file.write(text)
    return PASSED if all(verdict.passed for verdict in verdicts) else FAILED


def run(name: str, suite: Suite, run_dir: Path) -> int:
    """Run the suite within its minutes, then judge it."""
    limit = ["timeout", "--signal=TERM", f"--kill-after={END_SECONDS}", f"{suite.minutes}m"]
    done = subprocess.run([*limit, *suite.command, "--run-dir", str(run_dir)], cwd=ROOT)
    if done.returncode:
        reason = f"{suite.minutes} minutes were not enough" if done.returncode == 124 else f"exit {done.returncode}"
        print(f"error: {name}: {reason}", file=sys.stderr)
        return FAILED
    return gate(name, suite, run_dir)


def matrix(suites: Mapping[str, Suite]) -> str:
    """One entry per suite, for `strategy.matrix`."""
    entries = [
        {"suite": name, "runner": suite.runner, "limit": suite.minutes + SET_UP_MINUTES, "extras": suite.extras}
        for name, suite in suites.items()
    ]
    return json.dumps({"include": entries})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("matrix", help="print the suites as JSON for a matrix of runners")
    for command, text in (("run", "run a suite and judge it"), ("gate", "judge a run that was")):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("suite", help="a name of .ci/suites.toml")
        sub.add_argument("run_dir", type=Path, help="the run directory")
    parsed = parser.parse_args(words)
    suites = read_suites()
    if parsed.command == "matrix":
        print(matrix(suites))
        return PASSED
    if parsed.suite not in suites:
        print(f"error: no suite {parsed.suite}; there are {', '.join(suites)}", file=sys.stderr)
        return WRONG
    act = run if parsed.command == "run" else gate
    return act(parsed.suite, suites[parsed.suite], parsed.run_dir.absolute())


if __name__ == "__main__":
    sys.exit(main())
