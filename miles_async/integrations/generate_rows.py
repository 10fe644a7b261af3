"""Writes the prompts of ``--environment`` to standard output, as JSON lines: a separate process, since packages may
set variables and start threads, which processes that are forked later must not have.

    python -m miles_async.integrations.generate_rows KIND NAME CONFIG COUNT SEED
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

_REFUSED = 2  # exit status: the last line of standard error says why


def generated_rows(kind: str, name: str, config: Mapping[str, object], count: int, seed: int) -> list[JsonObject]:
    """Generate rows in a process of this Python. Raises ConfigurationError."""
    words = [sys.executable, "-m", __name__, kind, name, json.dumps(config), str(count), str(seed)]
    # Modules are looked up as in this process: in the working directory, too.
    modules = os.pathsep.join(filter(None, sys.path))
    return rows_of(words, f"--environment {kind}:{name}", {**os.environ, "PYTHONPATH": modules})


def rows_of(command: Sequence[str], flag: str, environment: Mapping[str, str]) -> list[JsonObject]:
    """Return the JSON lines that a command writes. Raises ConfigurationError with ``flag`` and its last words."""
    done = subprocess.run(command, capture_output=True, env=environment)
    if done.returncode:
        *_, last = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        reason = last if done.returncode == _REFUSED else f"generating its prompts failed: {last}"
        raise ConfigurationError(f"{flag}: {reason}")
    try:
        rows = [json.loads(line) for line in done.stdout.split(b"\n") if line]  # texts may hold other line ends
    except ValueError as error:
        raise ConfigurationError(f"{flag}: expected its prompts as JSON lines: {error}") from error
    if not rows:
        raise ConfigurationError(f"{flag}: it has no prompts")
    return rows


def _rows(kind: str, name: str, config: Mapping[str, object], count: int, seed: int) -> Iterator[JsonObject]:
    if kind == "reasoning_gym":
        from miles_async.integrations.reasoning_gym_tasks import rows

        return rows(name, config, count, seed)
    if kind == "openenv":
        from miles_async.integrations.openenv_episodes import OpenEnv

        return OpenEnv(name, config).rows(count, seed)
    if kind == "nemo-gym":
        from miles_async.integrations.nemo_gym_episodes import task_rows

        return task_rows(config, count)
    from miles_async.integrations.gymnasium_text import GymnasiumText

    return GymnasiumText(name, config).rows(count, seed)


def main(words: list[str]) -> int:
    """Write the rows; what the package and its processes print goes to standard error."""
    kind, name, config, count, seed = words
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        with output:
            for row in _rows(kind, name, json.loads(config), int(count), int(seed)):
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
    except ConfigurationError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
