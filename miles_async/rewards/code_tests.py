"""``code``: the program in the response passes the row's tests."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import msgspec
import structlog

from miles_async.arguments.rewards import SandboxMode
from miles_async.errors import ConfigurationError, RewardError
from miles_async.rewards import confinement
from miles_async.rewards.answers import answer_part
from miles_async.rewards.programs import Limits, run_program, run_statements
from miles_async.rewards.sandbox import Level
from miles_async.rewards.workers import WorkerPool
from miles_async.types import JsonObject, Label, Prompt, Sample

log = structlog.get_logger(__name__)

_END_SECONDS = 5.0  # for a worker to end a program that exceeds its time
_FENCED = re.compile(r"```([\w+#.-]*)[^\n`]*\n(.*?)```", re.DOTALL)  # language, content
_PYTHON = ("python", "py", "python3")


async def code_reward(
    workers: WorkerPool, limits: Callable[[], Limits], timeout: float, prompt: Prompt, sample: Sample
) -> float:
    """1 if the last fenced block of Python passes all tests, else 0: also if it crashes, loops or prints without end.

    Tests are ``tests`` of the row's metadata, or its label as JSON: ``{"inputs": [...], "outputs": [...]}``
    that the program reads and prints, or a list of statements such as ``"assert double(2) == 4"``, run after it.

    ``limits``: of one test, asked for when there is one. ``timeout``: seconds for all tests of a sample; a slower
    program is wrong.
    """
    tests = tests_of(prompt)
    program = last_program(sample.text)
    if program is None:
        return 0.0
    check, cases = (runs_through, (tests,)) if isinstance(tests, list) else (prints, (tests.inputs, tests.outputs))
    arguments = (program, *cases, asdict(limits()), timeout)
    return float(await workers.call(check, *arguments, more_seconds=_END_SECONDS))


def last_program(response: str) -> str | None:
    """The last fenced block of Python behind the thoughts; without one, the last whose language is not said."""
    blocks = _FENCED.findall(answer_part(response))
    programs = [block for language, block in blocks if language.lower() in _PYTHON]
    programs = programs or [block for language, block in blocks if not language]
    return programs[-1] if programs else None


CONFINED = frozenset({"code", "reasoning_gym"})
"""Rewards that execute what the model says."""


def sandbox_level(wanted: SandboxMode) -> Level:
    """Confinement of programs on this machine, by ``--reward-sandbox``; logs it.

    Raises ConfigurationError if this machine cannot enforce it.
    """
    if wanted == "off":
        log.warning("programs are not confined (--reward-sandbox off): they can do anything that the user can")
        return "off"
    if (machine := os.uname().machine) not in confinement.ARCHITECTURES:
        raise ConfigurationError(
            f"--reward-sandbox {wanted}: programs can be confined on {' and '.join(confinement.ARCHITECTURES)}; this "
            f"is {machine} (off runs them as they are)"
        )
    if version := confinement.landlock_version():
        log.info("programs are confined by seccomp and Landlock: they read Python's libraries only", landlock=version)
        return "landlock"
    if wanted == "strict":
        raise ConfigurationError(
            "--reward-sandbox strict: expected a kernel with Landlock (Linux 5.13 and later, not forbidden by the "
            "container), found none; auto works without it, and lets programs read what the user may read"
        )
    log.warning("programs are confined by seccomp alone: this kernel has no Landlock, so they read what the user may")
    return "seccomp"


class Tests(msgspec.Struct, forbid_unknown_fields=True):
    """Inputs of a program and the outputs it must print."""

    inputs: list[str]
    outputs: list[str]


def tests_of(prompt: Prompt) -> Tests | list[str]:
    """Read the tests of a prompt. Raises RewardError when it has none that can be run."""
    try:
        return read_tests(prompt.label, prompt.metadata)
    except RewardError as error:
        raise RewardError(f"prompt {prompt.prompt_id}: {error}") from error


def read_tests(label: Label | None, metadata: JsonObject) -> Tests | list[str]:
    """Read the tests of a row. Raises RewardError when it has none that can be run."""
    found: object = metadata.get("tests")
    try:
        if found is None:
            found = list(label) if isinstance(label, tuple) else msgspec.json.decode(label or "")
        tests = msgspec.convert(found, Tests | list[str])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RewardError(
            "expected tests in its metadata, or as JSON in its label: "
            f'{{"inputs": [texts], "outputs": [texts]}} or a list of assert statements ({error})'
        ) from error
    if isinstance(tests, Tests) and len(tests.inputs) != len(tests.outputs):
        raise RewardError(f"{len(tests.inputs)} inputs, but {len(tests.outputs)} outputs")
    if not (tests.inputs if isinstance(tests, Tests) else tests):
        raise RewardError("its list of tests is empty")
    return tests


def prints(program: str, inputs: list[str], outputs: list[str], limits: JsonObject, timeout: float) -> bool:
    """Return whether every output is as expected, up to white space between words. Runs in the worker."""
    deadline, each = time.monotonic() + timeout, Limits(**limits)
    for text, expected in zip(inputs, outputs, strict=True):
        left = min(each.seconds, deadline - time.monotonic())
        if left <= 0:
            return False
        output = run_program(program, text, replace(each, seconds=left))
        if output is None or _words(output) != _words(expected):
            return False
    return True


def runs_through(program: str, statements: list[str], limits: JsonObject, timeout: float) -> bool:
    """Return whether all statements pass, calling the program from another process (``remote_objects.py``)."""
    all_together = Limits(**limits)
    all_together = replace(all_together, seconds=min(all_together.seconds, timeout))
    return run_statements(program, "\n".join(statements), all_together)


def _words(output: str) -> list[list[str]]:
    return [line.split() for line in output.strip().splitlines()]
