"""Replace files atomically: readers find all of the new text or all of the old one."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file. Raises OSError; the file is as it was then, or absent."""
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_bytes(content)
    unfinished.replace(path)
