"""The first hour on GPUs: a ladder of steps from cheap to dear, each with a limit of time and a verdict.

    make gpu-hour                                             everything; a report in runs/gpu_hour
    .venv/bin/python -m scripts.gpu_hour --list               the steps and their limits
    .venv/bin/python -m scripts.gpu_hour --only doctor kill   these alone

A step that fails or takes too long does not stop the others. Nothing is downloaded. On a machine without GPUs the same
ladder is a rehearsal, without the steps that need CUDA. docs/gpu_results.md says how to read the report. Exit status:
0 nothing failed, 1 something did.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from miles_async.commands.gpu_report import FORMAT
from scripts.gpu_steps import STEPS, Bench, Figures, Skipped, Step, first_line

ROOT = Path(__file__).resolve().parent.parent
Verdict = Literal["passed", "failed", "too slow", "skipped"]
PACKAGES = ("torch", "transformer-engine", "megatron-core", "megatron-bridge", "sglang", "ray")
LONGEST_REASON = 300  # characters of the table; the JSON has all


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One step, done."""

    key: str
    step: str
    verdict: Verdict
    seconds: float
    limit: float  # seconds
    reason: str = ""  # unless it passed
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a machine showed."""

    machine: dict[str, str]
    outcomes: list[Outcome]
    format: int = FORMAT

    @property
    def failed(self) -> bool:
        return any(outcome.verdict in ("failed", "too slow") for outcome in self.outcomes)

    def markdown(self) -> str:
        """A section for docs/gpu_results.md."""
        title = ", ".join((self.machine["device"], self.machine["date"], self.machine["commit"]))
        lines = [f"## {title}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in self.machine.items()]
        lines += ["", "| step | verdict | seconds | limit | |", "|---|---|---|---|---|"]
        lines += [_row(outcome) for outcome in self.outcomes]
        return "\n".join(lines) + "\n"


def climb(steps: Sequence[Step], bench: Bench, show: Callable[[str], None]) -> Iterator[Outcome]:
    """Take the steps one after another, whatever becomes of those before."""
    for step in steps:
        show(f"{step.name} (at most {step.limit:g} s) ...")
        outcome = _take(step, bench)
        show(f"  {outcome.verdict} after {outcome.seconds:.0f} s {_short(outcome.reason)}")
        yield outcome


def _take(step: Step, bench: Bench) -> Outcome:
    started = time.monotonic()
    bench.deadline = started + step.limit
    verdict: Verdict = "passed"
    reason = ""
    figures: Figures = {}
    try:
        if step.needs_cuda and bench.device == "cpu":
            raise Skipped("no CUDA device")
        figures = step.take(bench)
    except Skipped as skipped:
        verdict, reason = "skipped", str(skipped)
    except Exception as error:  # supervision point: the others are taken all the same
        verdict = "too slow" if time.monotonic() >= bench.deadline else "failed"
        reason = f"{type(error).__name__}: {error}"
    return Outcome(
        key=step.key,
        step=step.name,
        verdict=verdict,
        seconds=time.monotonic() - started,
        limit=step.limit,
        reason=reason,
        figures=figures,
    )


def machine_facts(bench: Bench) -> dict[str, str]:
    """What makes reports of two machines comparable."""
    commit = first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    facts = {"device": bench.name, "date": time.strftime("%Y-%m-%d"), "commit": commit or "unknown"}
    facts["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _row(outcome: Outcome) -> str:
    shown = [
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in outcome.figures.items()
        if isinstance(value, str | float | int)
    ]
    told = _short(outcome.reason) or ", ".join(shown)
    return f"| {outcome.step} | {outcome.verdict} | {outcome.seconds:.0f} | {outcome.limit:g} | {told} |"


def _short(reason: str) -> str:
    words = " ".join(reason.split()).replace("|", "/")
    return words if len(words) <= LONGEST_REASON else f"{words[:80]} ... {words[80 - LONGEST_REASON :]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[step.key for step in STEPS], help="take these steps alone")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_hour", help="folder (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the steps and end")
    parsed = parser.parse_args(arguments)
    if parsed.list:
        for step in STEPS:
            print(f"{step.key:10} {step.limit:5g} s  {step.name}")
        return 0
    bench = Bench.here(parsed.output / time.strftime("%Y%m%d-%H%M%S"))
    chosen = [step for step in STEPS if not parsed.only or step.key in parsed.only]
    machine, outcomes = machine_facts(bench), list[Outcome]()
    for outcome in climb(chosen, bench, lambda line: print(line, flush=True)):
        outcomes.append(outcome)
        report = Report(machine=machine, outcomes=outcomes)  # also of an hour that is cut short
        (parsed.output / "report.md").write_text(report.markdown())
        (parsed.output / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    print(f"{parsed.output / 'report.md'} and report.json")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
