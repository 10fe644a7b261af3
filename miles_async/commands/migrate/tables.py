"""``miles-async migrate --table``: each flag, value, default and key of another system on a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal, get_args

from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.commands.migrate.defaults import DEFAULTS
from miles_async.commands.migrate.verl_keys import KEYS

System = Literal["slime", "miles", "verl"]
SYSTEMS: tuple[System, ...] = get_args(System)


def table(system: System) -> Iterator[str]:
    """Yield the lines. slime and miles share a table, with the flags of Megatron-LM, SGLang and smg that they take."""
    if system == "verl":
        for key in sorted(KEYS, key=lambda key: key.key):
            yield _line(key.key, key.only, key.verdict, key.note)
        return
    rows = sorted(FOREIGN_FLAGS.values(), key=lambda row: (row.origin, row.flag))
    for origin, of_origin in groupby(rows, key=lambda row: row.origin):
        yield f"# {origin}\n"
        yield from (_line(row.flag, row.only, row.verdict, row.note) for row in of_origin)
    yield "# Values\n"
    for value in FOREIGN_VALUES.values():
        verdict = f"works, as {' '.join(value.ours)}" if value.ours else "refused"
        yield _line(f"{value.flag} {value.value}", (), verdict, value.note)
    yield "# Defaults that differ from ours and decide what is trained, as our flags\n"
    for default in DEFAULTS:
        shown = f"{default.flag} {default.value if isinstance(default.value, str) else ''}".rstrip()
        conditions = [f"unless {' or '.join(default.unless)}" if default.unless else "",
                      f"with {default.needs}" if default.needs else ""]  # fmt: skip
        note = ", ".join(filter(None, [default.about, *conditions]))
        yield f"{shown}  {note}".rstrip() + "\n"


def _line(name: str, only: Iterable[str], verdict: str, note: str) -> str:
    values = " or ".join(only)
    return f"{name}{f' {values}' if values else ''}  {verdict}: {note.replace('`', '')}\n"
