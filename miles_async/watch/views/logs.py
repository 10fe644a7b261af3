"""Logs of a run's processes: read from the end, and searched without loading them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from miles_async.runtime.json_texts import decoded_object
from miles_async.runtime.texts import shortened
from miles_async.types import JsonObject
from miles_async.watch.run import Run

PAGE_BYTES = 1 << 17
SEARCH_BYTES = 1 << 28  # from the end; a debug log may be larger
MOST_MATCHES = 500
MATCHES_OF_EACH = 20  # of each log, where all are searched
LONGEST_LINE = 4_000  # characters
_BLOCK = 1 << 22
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")  # smg writes them into files too

OUTSIDE = ("console.log", "stall.txt")
"""Texts that stand in the run directory itself."""

PROCESSES: Mapping[str, str] = {
    "driver and rollout": r"(driver|rollout|rollout-output|actor_imports)\.log|" + "|".join(map(re.escape, OUTSIDE)),
    "trainer ranks": r"(trainer-\d+|rank_imports)\.log",
    "routers": r"router.*",
    "sessions and environments": r"(sessions-|agents|verifiers|mcp-servers).*",
    "engines": r".+-\d+(\.node\d+)?\.\d+\.log|engine_imports\.log",
    "others": r".*",
}
"""Kind of process → pattern of its log's name; the first match counts."""


def logs(run: Run) -> list[JsonObject]:
    """Logs by process and name: [{"name", "bytes", "changed", "process": one of PROCESSES}]."""
    names = [*OUTSIDE]
    with suppress(OSError):
        names += [path.name for path in (run.directory / "logs").iterdir()]
    found: list[JsonObject] = []
    for name in names:
        if (path := _path(run, name)) is not None:
            status, process = path.stat(), next(each for each, like in PROCESSES.items() if re.fullmatch(like, name))
            found.append({"name": name, "bytes": status.st_size, "changed": status.st_mtime, "process": process})
    order = [*PROCESSES]
    return sorted(found, key=lambda log: (order.index(log["process"]), natural(log["name"])))


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which numbers in names sort as numbers.

    >>> sorted(["engine-10", "engine-9", "a"], key=natural)
    ['a', 'engine-9', 'engine-10']
    """
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


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
    return {"lines": [*_lines(block, start)], "start": start, "end": end, "bytes": size}


def search(run: Run, name: str, text: str) -> JsonObject:
    """Lines that contain ``text``, in any case, the last ones. {"lines", "matches", "bytes"}."""
    path = _path(run, name)
    if path is None:
        return _absent(name)
    found, count = _matching(path, text, SEARCH_BYTES)
    return {"lines": found[-MOST_MATCHES:], "matches": count, "bytes": path.stat().st_size}


def search_all(run: Run, text: str) -> JsonObject:
    """Lines of all logs that contain ``text``: {"logs": [{"name", "matches", "lines": the last ones}], "matches"}."""
    names = [str(log["name"]) for log in logs(run)]
    found: list[JsonObject] = []
    for name in names:
        if (path := _path(run, name)) is not None:
            lines, count = _matching(path, text, SEARCH_BYTES // len(names))
            if count:
                found.append({"name": name, "matches": count, "lines": lines[-MATCHES_OF_EACH:]})
    return {"logs": found, "matches": sum(log["matches"] for log in found)}


def _matching(path: Path, text: str, most_bytes: int) -> tuple[list[JsonObject], int]:
    """(the last matches, their number) in the last ``most_bytes`` of a log."""
    wanted = text.lower().encode(errors="replace")
    found: list[JsonObject] = []
    count = 0
    with path.open("rb") as file:
        offset = max(0, path.stat().st_size - most_bytes)
        file.seek(offset)
        rest = b""
        while block := file.read(_BLOCK):
            whole, newline, tail = (rest + block).rpartition(b"\n")
            for line in _lines(whole, offset, wanted) if wanted in whole.lower() else ():  # most blocks have none
                count += 1
                found.append(line)
            found = found[-MOST_MATCHES:]
            offset += len(whole) + len(newline)
            rest = tail
        last = [*_lines(rest, offset, wanted)]
    return [*found, *last], count + len(last)


def _path(run: Run, name: str) -> Path | None:
    if name in OUTSIDE:
        return run.file(name)
    return run.file("logs", name) if Path(name).name == name else None


def _absent(name: str) -> JsonObject:
    return {"lines": [], "start": 0, "end": 0, "bytes": 0, "matches": 0, "missing": f"there is no log {name}"}


def _lines(block: bytes, offset: int, wanted: bytes = b"") -> Iterator[JsonObject]:
    for line in block.split(b"\n"):
        if line and (not wanted or wanted in line.lower()):
            yield {"at": offset, **_entry(line)}
        offset += len(line) + 1


def _entry(line: bytes) -> JsonObject:
    text = shortened(_COLOUR.sub(b"", line).decode(errors="replace"), LONGEST_LINE)
    entry = decoded_object(line) if line.startswith(b"{") else {}
    if "event" not in entry:
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
