"""The page's modules as one script, for a report: a file that is opened from a disk may not import others.

Modules are written in a small part of JavaScript's module syntax, which is all that is translated here: ``import {a}
from "./b.js"``, ``import a from``, ``import * as a from``, and ``export`` before a declaration. Anything else raises.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

_IMPORT = re.compile(
    r"""^import\s+(?:\{(?P<names>[^}]*)\}|\*\s+as\s+(?P<all>\w+)|(?P<default>\w+))\s+from\s+"(?P<module>[^"]+)";""",
    re.M,
)
_EXPORT = re.compile(r"^export (?P<kind>async function|function|const|class) (?P<name>\w+)", re.M)
_EXPORT_DEFAULT = re.compile(r"^export \{ (?P<name>\w+) as default \};", re.M)
_COMMENT = re.compile(r"^/\*.*?\*/", re.M | re.S)
_LEFT = re.compile(r"^(import|export)\b.*", re.M)


def bundle(folder: Path, entry: str) -> str:
    """One classic script that runs module ``entry`` of ``folder``. Raises ValueError on syntax it does not know."""
    order: list[str] = []
    _collect(folder, entry, order, ())
    parts = [_wrapped(name, (folder / name).read_text(encoding="utf-8")) for name in order]
    return '"use strict";\nconst modules = {};\n' + "\n".join(parts) + "\n"


def _collect(folder: Path, name: str, order: list[str], path: tuple[str, ...]) -> None:
    """Modules, each after its imports."""
    if name in path:
        raise ValueError(f"modules import each other in a circle: {' -> '.join([*path, name])}")
    if name in order:
        return
    for match in _IMPORT.finditer((folder / name).read_text(encoding="utf-8")):
        _collect(folder, _resolved(name, match["module"]), order, (*path, name))
    order.append(name)


def _resolved(importer: str, module: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(importer), module))


def _wrapped(name: str, text: str) -> str:
    text = _COMMENT.sub("", text)
    exports = [match["name"] for match in _EXPORT.finditer(text)]
    whole = [*exports]
    if default := _EXPORT_DEFAULT.search(text):
        whole.append(f"default: {default['name']}")
    text = _EXPORT_DEFAULT.sub("", text)
    text = _EXPORT.sub(r"\g<kind> \g<name>", text)
    text = _IMPORT.sub(lambda match: _taken(name, match), text)
    if left := _LEFT.search(text):
        raise ValueError(f"{name}: cannot put this into one file: {left[0][:80]}")
    return f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {", ".join(whole)} }};\n}})();'


def _taken(importer: str, match: re.Match[str]) -> str:
    module = f'modules["{_resolved(importer, match["module"])}"]'
    if match["names"] is not None:
        return f"const {{ {match['names'].replace(' as ', ': ').strip()} }} = {module};"
    return f"const {match['all']} = {module};" if match["all"] else f"const {match['default']} = {module}.default;"
