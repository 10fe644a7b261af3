"""Check which confinement of code (``--rm-type code``) this machine can enforce."""

from __future__ import annotations

import os
from collections.abc import Iterator

from miles_async.errors import ServiceUnavailableError
from miles_async.machine.finding import Finding
from miles_async.rewards import confinement
from miles_async.rewards.programs import Limits, run_program
from miles_async.rewards.sandbox import Level

_PROGRAM = "print(sum(range(10)))"


def sandbox_findings() -> Iterator[Finding]:
    """Run a program in the sandbox, as a reward would."""
    if (machine := os.uname().machine) not in confinement.ARCHITECTURES:
        yield Finding(
            check="sandbox",
            verdict="warning",
            found=f"programs cannot be confined on {machine}; on {' and '.join(confinement.ARCHITECTURES)} they can",
            mend="rewards that run code need --reward-sandbox off here, with nothing but limits of time and memory",
        )
        return
    level: Level = "landlock" if confinement.landlock_version() else "seccomp"
    try:
        output = run_program(_PROGRAM, "", Limits(seconds=10.0, memory_bytes=1 << 30, level=level))
    except ServiceUnavailableError as error:
        found, output = str(error), None
    else:
        found = f"a confined program did not print what it should, it printed {output!r}"
    if output != "45\n":
        yield Finding(
            check="sandbox",
            verdict="warning",
            found=found,
            mend="in a container: docker run --security-opt seccomp=unconfined; or --reward-sandbox off",
        )
    elif level == "landlock":
        yield Finding(
            check="sandbox", verdict="ok", found="seccomp and Landlock: programs read Python's libraries only"
        )
    else:
        yield Finding(
            check="sandbox",
            verdict="warning",
            found="seccomp alone, no Landlock: programs read what the user can, --reward-sandbox strict is refused",
            mend="Linux 5.13 or newer with landlock in /sys/kernel/security/lsm (kernel parameter lsm=landlock,...)",
        )
