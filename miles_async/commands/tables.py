"""Tables as text, for commands that return what they print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH = 120  # columns, where the output is not a terminal


def printed(*parts: Table | str, least: int = 0) -> str:
    """The parts as wide as the terminal, and no narrower than ``least`` columns."""
    terminal = Console()
    console = Console(width=max(terminal.width if terminal.is_terminal else WIDTH, least))
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()
