"""``code``: the program in the response passes the row's tests."""

from __future__ import annotations

import os
import re
import uuid
from typing import Any

import msgspec

from miles_async.errors import ConfigurationError, RewardError
from miles_async.rewards import sandbox
from miles_async.rewards.answers import answer_part
from miles_async.rewards.programs import run_program
from miles_async.rewards.workers import WorkerPool
from miles_async.types import Prompt, Sample

_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeReward:
    """1 if the last fenced block of Python passes all tests, else 0: also if it crashes, loops or prints without end.

    Tests are ``tests`` of the row's metadata, or its label as JSON: ``{"inputs": [...], "outputs": [...]}`` of what
    the program reads and prints, or a list of statements such as ``"assert double(2) == 4"``, run after it.
    """

    def __init__(self, workers: WorkerPool, *, seconds: float, memory_mib: int) -> None:
        """``seconds``, ``memory_mib``: that a program may take for one test."""
        self._workers = workers
        self._limits = (seconds, memory_mib << 20)

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        tests = tests_of(prompt)
        blocks = _FENCED.findall(answer_part(sample.text))
        if not blocks:
            return 0.0
        if isinstance(tests, list):
            return float(await self._workers.call(runs_through, blocks[-1], tests, *self._limits))
        return float(await self._workers.call(prints, blocks[-1], tests.inputs, tests.outputs, *self._limits))


def require_sandbox() -> None:
    """Raises ConfigurationError if programs cannot be confined on this machine."""
    if (machine := os.uname().machine) not in sandbox.ARCHITECTURES:
        raise ConfigurationError(
            f"--rm-type code: programs can be confined on {' and '.join(sandbox.ARCHITECTURES)}; this is {machine}"
        )


class Tests(msgspec.Struct, forbid_unknown_fields=True):
    """What programs read and have to print."""

    inputs: list[str]
    outputs: list[str]


def tests_of(prompt: Prompt) -> Tests | list[str]:
    """Raises RewardError when the row has no tests that can be run."""
    found: Any = prompt.metadata.get("tests")
    try:
        if found is None:
            found = msgspec.json.decode(prompt.label or "")
        tests = msgspec.convert(found, Tests | list[str])
    except msgspec.MsgspecError as error:
        raise RewardError(
            f"prompt {prompt.prompt_id}: expected tests in its metadata, or as JSON in its label: "
            f'{{"inputs": [texts], "outputs": [texts]}} or a list of assert statements ({error})'
        ) from error
    if isinstance(tests, Tests) and len(tests.inputs) != len(tests.outputs):
        raise RewardError(f"prompt {prompt.prompt_id}: {len(tests.inputs)} inputs, but {len(tests.outputs)} outputs")
    if not (tests.inputs if isinstance(tests, Tests) else tests):
        raise RewardError(f"prompt {prompt.prompt_id}: its list of tests is empty")
    return tests


def prints(program: str, inputs: list[str], outputs: list[str], seconds: float, memory_bytes: int) -> bool:
    """In the worker: whether every output is as expected, but for the white space between words."""
    for text, expected in zip(inputs, outputs, strict=True):
        output = run_program(program, text, seconds, memory_bytes)
        if output is None or _words(output) != _words(expected):
            return False
    return True


def runs_through(program: str, statements: list[str], seconds: float, memory_bytes: int) -> bool:
    """In the worker: whether no statement fails. That the end is reached is printed: leaving early is no way out."""
    reached = uuid.uuid4().hex
    output = run_program("\n".join([program, *statements, f"print({reached!r})"]), "", seconds, memory_bytes)
    return output is not None and output.rstrip().endswith(reached)


def _words(output: str) -> list[list[str]]:
    return [line.split() for line in output.strip().splitlines()]
