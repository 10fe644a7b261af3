"""Logs of a run's processes: read from the end, and searched without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_async.runtime.texts import shortened
from miles_async.types import JsonObject
from miles_async.watch.json_texts import decoded
from miles_async.watch.run import Run

PAGE_BYTES = 1 << 17
SEARCH_BYTES = 1 << 28  # from the end; a debug log may be larger
MOST_MATCHES = 500
LONGEST_LINE = 4_000  # characters
_BLOCK = 1 << 22


def logs(run: Run) -> list[JsonObject]:
    """Logs by name: [{"name", "bytes", "changed"}]."""
    directory = run.directory / "logs"
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return []
    found: list[JsonObject] = []
    for path in paths:
        if (inside := run.file("logs", path.name)) is not None:
            status = inside.stat()
            found.append({"name": path.name, "bytes": status.st_size, "changed": status.st_mtime})
    return found


def page(run: Run, name: str, before: int | None = None) -> JsonObject:
    """The lines that end at byte ``before`` (default: the end): {"lines", "start", "end", "bytes"}; 0 is the top."""
    path = _path(run, name)
    if path is None:
        return _absent(name)
    size = path.stat().st_size
    end = size if before is None else max(0, min(before, size))
    start = max(0, end - PAGE_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        block = file.read(end - start)
    if start > 0 and b"\n" in block:
        cut = block.index(b"\n") + 1
        start, block = start + cut, block[cut:]
    return {"lines": [line for line in _lines(block, start)], "start": start, "end": end, "bytes": size}


def search(run: Run, name: str, text: str) -> JsonObject:
    """Lines that contain ``text``, in any case, the last ones. {"lines", "matches", "bytes"}."""
    path = _path(run, name)
    if path is None:
        return _absent(name)
    size = path.stat().st_size
    wanted = text.lower().encode(errors="replace")
    found: list[JsonObject] = []
    count = 0
    with path.open("rb") as file:
        offset = max(0, size - SEARCH_BYTES)
        file.seek(offset)
        rest = b""
        while block := file.read(_BLOCK):
            whole, newline, tail = (rest + block).rpartition(b"\n")
            for line in _lines(whole, offset, wanted):
                count += 1
                found.append(line)
            found = found[-MOST_MATCHES:]
            offset += len(whole) + len(newline)
            rest = tail
        last = [*_lines(rest, offset, wanted)]
    return {"lines": [*found, *last][-MOST_MATCHES:], "matches": count + len(last), "bytes": size}


def _path(run: Run, name: str) -> Path | None:
    return run.file("logs", name) if Path(name).name == name else None


def _absent(name: str) -> JsonObject:
    return {"lines": [], "start": 0, "end": 0, "bytes": 0, "matches": 0, "missing": f"there is no log {name}"}


def _lines(block: bytes, offset: int, wanted: bytes = b"") -> Iterator[JsonObject]:
    for line in block.split(b"\n"):
        if line and (not wanted or wanted in line.lower()):
            yield {"at": offset, **_entry(line)}
        offset += len(line) + 1


def _entry(line: bytes) -> JsonObject:
    text = shortened(line.decode(errors="replace"), LONGEST_LINE)
    entry = decoded(line) if line.startswith(b"{") else None
    if not isinstance(entry, dict) or "event" not in entry:
        return {"text": text}
    fields = {
        name: shortened(str(value), LONGEST_LINE)
        for name, value in entry.items()
        if name not in ("event", "level", "timestamp", "logger")
    }
    return {
        "text": shortened(str(entry["event"]), LONGEST_LINE),
        "level": str(entry.get("level", "")),
        "timestamp": str(entry.get("timestamp", "")),
        "logger": str(entry.get("logger", "")).removeprefix("miles_async."),
        "fields": fields,
    }
