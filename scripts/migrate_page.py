"""Write docs/migrate.md: what becomes of each flag of other systems, from the tables in arguments/foreign/.

From the repository root:

    .venv/bin/python scripts/migrate_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.arguments.foreign.defaults import DEFAULTS
from miles_async.arguments.foreign.record import ForeignFlag
from miles_async.arguments.foreign.verl import KEYS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "migrate.md"
EXAMPLES = ROOT / "examples" / "migrate"

HEADER = """\
# Coming from another system

Written by `.venv/bin/python scripts/migrate_page.py` from the tables that read the flags, `arguments/foreign/`, and the
recipes of `examples/migrate/`; not edited by hand.

A command line of slime or miles is mostly one of ours, and most keys of verl's configuration are flags here. Give your
paths, your cluster, and how old data may be: `--max-weight-staleness 2 --use-rollout-logprobs`, or `--on-policy` for
their synchronous loop. `--dry-run` then lists every flag that changes nothing here, and refuses what cannot work with
the reason. What a command line leaves out has *our* default; a few of theirs differ, and `miles-async migrate` writes
them out ([list](#defaults)).

    miles-async migrate run-qwen3-4B.sh > qwen3-4b.args

This command reads a script of theirs (arrays, variables, arithmetic, sourced files; it is not run) and prints the
flags that remain here, defaults that differ, what became of the other flags and why, and which variables it could not
know. Exit code 1 means that something could not be mapped or known, or that `train` would refuse the result; the
reasons are printed. Files are not looked at: `--dry-run` does that. Scripts of verl, with their `key=value`, are read
by this command only. A script in Python decides its flags as it runs: `miles-async migrate -` reads the command that it
prints.

Flags of Megatron-LM that are fields of its configs work under their own name, as `--megatron-X` and as `--X`;
`miles-async train --help-megatron` lists them. Those that have a flag of ours, or that the run decides, are refused
with what to do. `--sglang-X` reaches SGLang and `--router-X` smg, as `--X`.

- *works*: the flag sets what the note says.
- *checked*: the flag has to agree with the model, or with other flags; an error names both.
- *noted*: the flag is accepted without effect, for the reason given; values other than those in brackets are refused.
- *refused*: the flag is an error with the note as its reason.

| a recipe of | theirs | ours |
|---|---|---|
| slime | [slime.sh](../examples/migrate/slime.sh) | [slime.args](../examples/migrate/slime.args) |
| miles, with adapters | [miles.sh](../examples/migrate/miles.sh) | [miles.args](../examples/migrate/miles.args) |
| verl | [verl.sh](../examples/migrate/verl.sh) | [verl.args](../examples/migrate/verl.args) |

[All three](#recipes-side-by-side) are at the end of this page.
"""

RECIPES = ("slime", "miles", "verl")


def lines() -> Iterator[str]:
    """Lines of the page after its header."""
    rows = sorted(FOREIGN_FLAGS.values(), key=lambda row: (row.origin, row.flag))
    for origin, of_origin in groupby(rows, key=lambda row: row.origin):
        yield from ("", f"## {origin}", "", "| flag | here | |", "|---|---|---|")
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in of_origin:
            alike.setdefault((_values(row), row.verdict, _as_code(row.note)), []).append(f"`{row.flag}`")
        yield from (
            f"| {', '.join(flags)}{values} | {here} | {note} |" for (values, here, note), flags in alike.items()
        )
    yield from ("", "## Values", "", "| flag and value | here | |", "|---|---|---|")
    for value in FOREIGN_VALUES.values():
        here = f"works, as `{' '.join(value.ours)}`" if value.ours else "refused"
        yield f"| `{value.flag} {value.value}` | {here} | {_as_code(value.note)} |"
    yield from _defaults()
    yield from _verl()
    yield from ("", "## Recipes side by side")
    for name in RECIPES:
        yield from ("", f"### {name}", "", "```bash", (EXAMPLES / f"{name}.sh").read_text().rstrip(), "```", "")
        yield from ("Here:", "", "```", (EXAMPLES / f"{name}.args").read_text().rstrip(), "```")


def _defaults() -> Iterator[str]:
    yield from (
        "",
        "## Defaults",
        "",
        "Those of slime and miles that differ from ours and decide what is trained. `miles-async migrate` writes them",
        "where a script does not give the flag.",
        "",
        "| theirs, in our flags | unless there is | only with |",
        "|---|---|---|",
    )
    for row in DEFAULTS:
        unless = ", ".join(f"`{flag}`" for flag in row.unless)
        value = f" {row.value}" if isinstance(row.value, str) and row.value else ""
        shown = f"`{row.flag}{value}`" + (f": {row.about}" if row.about else "")
        yield f"| {shown} | {unless} | {f'`{row.needs}`' if row.needs else ''} |"


def _verl() -> Iterator[str]:
    yield from (
        "",
        "## verl",
        "",
        "Keys that its recipes use. Where a default of verl's differs from ours it is printed,",
    )
    yield from ("too.", "", "| key | here | |", "|---|---|---|")
    for row in sorted(KEYS, key=lambda row: row.key):
        only = f" ({', '.join(f'`{value}`' for value in row.only)})" if row.only else ""
        yield f"| `{row.key}`{only} | {row.verdict} | {_as_code(row.note)} |"


def _values(row: ForeignFlag) -> str:
    return f" ({', '.join(f'`{value}`' for value in row.only)})" if row.only else ""


def _as_code(text: str) -> str:
    return text if "`" in text else re.sub(r"--[a-z][\w*-]*", r"`\g<0>`", text)


def page() -> str:
    """The whole page."""
    return HEADER + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
