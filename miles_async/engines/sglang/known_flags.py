"""The flags that SGLang and smg know, so that a misspelled ``--sglang-X`` or ``--router-X`` costs no start.

SGLang's are read from its source: importing it to ask takes ten seconds. Only names are checked, not values.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path

_FLAG = re.compile(r"--[a-z0-9](?:-?[a-z0-9])*(?![a-z0-9-])")
_HELP_SECONDS = 30.0
_SUGGESTIONS = 3


def unknown_flags(words: Sequence[str], known: Collection[str], prefix: str) -> Iterator[str]:
    """One line per flag of ``words`` that is not in ``known``; nothing if ``known`` is empty.

    ``prefix``: what the user writes instead of ``--``, such as ``--sglang-``. A flag may be negated (``--no-X``). It
    may not be abbreviated, although SGLang's argparse allows it: an abbreviation may fit two flags tomorrow.
    """
    for word in words:
        flag = word.partition("=")[0]
        switched_on = flag.replace("--no-", "--", 1)
        if not known or not _FLAG.fullmatch(flag) or flag in known or switched_on in known:
            continue
        longer = sorted(name for name in known if name.startswith(flag))
        near = longer[:_SUGGESTIONS] or difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
        hint = f"; did you mean {' or '.join(prefix + name[2:] for name in near)}?" if near else ""
        yield f"{prefix}{flag[2:]} is passed on as {flag}, which the installed version does not know{hint}"


_OPEN = "it opens a door without the run's keys"

REFUSED: Mapping[str, str] = {
    "--incremental-streaming-output": "streams of the session server read all tokens so far from each event",
    "--enable-dp-attention-local-control-broadcast": "ranks would pause at different times, while each waits for all",
    "--tokenizer-worker-num": "SGLang serves by other processes then, whose doors are open without the run's keys",
    "--grpc-port": _OPEN,
    "--grpc-mode": _OPEN,
    "--smg-grpc-mode": _OPEN,
    "--encoder-only": _OPEN,
    "--remote-instance-weight-loader-start-seed-via-transfer-engine": _OPEN,
    "--config": "flags in a file are not checked, so write them here",
}
"""Flags of SGLang's servers that a run cannot have, and why. ``--tokenizer-worker-num 1`` is the default."""

# With --enable-dp-attention they count attention groups instead.
_REPLICAS = dict.fromkeys(
    ("--dp-size", "--data-parallel-size"),
    "SGLang updates no engine that has several replicas: the run takes more engines instead",
)


def refused_flags(words: Sequence[str], prefix: str, *, beside: Sequence[str] = ()) -> Iterator[str]:
    """Yield one line per flag of ``words`` that is in ``REFUSED``. ``prefix``: as for :func:`unknown_flags`.
    ``beside``: words that the same engines get from elsewhere.
    """
    refused = REFUSED if "--enable-dp-attention" in (*words, *beside) else {**REFUSED, **_REPLICAS}
    for word, following in zip_longest(words, words[1:]):
        flag, assigned, value = word.partition("=")
        if flag in refused and (flag, value if assigned else following) != ("--tokenizer-worker-num", "1"):
            yield f"{prefix}{flag[2:]}: {refused[flag]}; leave it out"


@cache
def sglang_flags() -> frozenset[str]:
    """Return the flags of the installed SGLang's server; empty if it isn't installed.

    They are the annotated fields of its argument classes, and the flags that its source spells out.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0]) / "srt"
    files = (source / "server_args.py", *(source / "arg_groups" / "fields").glob("*.py"))
    return frozenset(flag for file in files if file.is_file() for flag in _flags_in(ast.parse(file.read_text())))


def _flags_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                        yield "--" + name.replace("_", "-")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value


def smg_flags() -> frozenset[str]:
    """Return the flags of ``smg launch``; empty if it isn't installed."""
    return frozenset(_FLAG.findall(_smg_help()))


def smg_policies() -> tuple[str, ...]:
    """Return the policies of ``smg launch``; empty if it isn't installed."""
    found = re.search(r" --policy \{([a-z_,]+)\}", _smg_help())
    return tuple(found[1].split(",")) if found else ()


@cache
def _smg_help() -> str:
    try:
        shown = subprocess.run(
            [sys.executable, "-m", "smg", "launch", "--help"],
            capture_output=True, text=True, check=True, timeout=_HELP_SECONDS,
            env={**os.environ, "COLUMNS": "10000"},  # no flag is broken at the end of a line
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout
