"""The output of programs that recipes call as ``$(program ...)``: dates, parts of paths, counts of items."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import PurePosixPath

_WORD = r"[^\s()`|]+"
_BEFORE_CALL = re.compile(r"\$(\w+)(?=\$\(|`)")
_HERE = re.compile(r"\$\(pwd\)|`pwd`")
_FORMAT = r"((?:(?!%\d*N)[^()$`])+)"  # strftime knows no nanoseconds
DATE = re.compile(rf"\$\(date \+{_FORMAT}\)|`date \+{_FORMAT}`")
_PART = re.compile(rf"\$\((basename|dirname) ({_WORD})\)")
_ITEMS = re.compile(rf"\$\(echo ({_WORD}) ?\| ?tr '?,'? '?\\n'? ?\| ?wc -l\)")
_PRINTED = (_HERE, DATE, _PART, _ITEMS)


def with_printed(word: str, expand: Callable[[str], str]) -> str:
    r"""``word`` with the output of these programs in place of their calls; ``expand`` puts variables in.

    A call whose words are not all known stays. A date is that of now.

    >>> with_printed("$(basename a/b.c)", str), with_printed("$(echo 0,1,2 | tr , \\n | wc -l)", str)
    ('b.c', '3')
    >>> with_printed("$(pwd)/a", str), with_printed("$(basename $(hostname))", str)
    ('${PWD}/a', '$(basename $(hostname))')
    """
    word = _HERE.sub("${PWD}", _BEFORE_CALL.sub(r"${\1}", word))
    word = DATE.sub(lambda found: datetime.now().astimezone().strftime(found[1] or found[2]), word)
    word = _PART.sub(lambda found: _part(found, expand), word)
    return _ITEMS.sub(lambda found: _count(found, expand), word)


def without_printed(text: str) -> str:
    """``text`` of a script without the calls that ``with_printed`` replaces."""
    text = re.sub("[\"']", "", text)
    for call in _PRINTED:
        text = call.sub("", text)
    return text


def _part(found: re.Match[str], expand: Callable[[str], str]) -> str:
    path = expand(found[2])
    if "$" in path:
        return found[0]
    # PurePosixPath leaves out a leading "./", which dirname keeps.
    kept = "./" if path.startswith("./") else ""
    return PurePosixPath(path).name if found[1] == "basename" else f"{kept}{PurePosixPath(path).parent}"


def _count(found: re.Match[str], expand: Callable[[str], str]) -> str:
    items = expand(found[1])
    return found[0] if "$" in items else str(items.count(",") + 1)
