"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fact about a machine, and the command that changes it if it is in the way.

    >>> Finding(check="disk", verdict="failure", found="/tmp has 0.1 GiB free", mend="du -xhd1 /tmp")
    """

    check: str  # its subject: "shared memory"
    verdict: Verdict  # "failure": a run cannot work; "warning": it can, and something is slower or missing
    found: str
    mend: str = ""  # a command, or a few words where there is none; empty if nothing is wrong

    @property
    def problem(self) -> str:
        return f"{self.check}: {self.found}; {self.mend}"


def gib(count: int) -> str:
    """Bytes for people.

    >>> gib(64 << 20), gib(3 << 40)
    ('0.1 GiB', '3072.0 GiB')
    """
    return f"{count / 2**30:.1f} GiB"
