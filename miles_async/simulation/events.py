"""Event log as text: same settings and seed, same bytes."""

from __future__ import annotations

import asyncio


class EventLog:
    """Lines "SECONDS KIND name=value ...", in virtual seconds."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.lines: list[str] = []
        self._enabled = enabled

    def add(self, kind: str, **fields: object) -> None:
        """Log one event at the current time."""
        if self._enabled:
            values = "".join(f" {name}={value}" for name, value in fields.items())
            self.lines.append(f"{asyncio.get_running_loop().time():.6f} {kind}{values}")

    def text(self) -> bytes:
        """The whole log."""
        return "".join(line + "\n" for line in self.lines).encode()
