"""What of our sources cannot be imported, and which names of other packages they use that are not there as used.

Names are read from the sources: imports, and attributes and calls of what was imported. A call must fit the signature
that the package has. Attributes of objects are not seen: what they are is known when the code runs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import arguments
import miles_async
from tests.gpu_contract.stand_ins import stand_in_for_transformer_engine

ABSENT = {"_typeshed", "mlflow", "reasoning_gym", "swanlab", "trackio", "verifiers"}
"""For type checkers, or extras that gpu.lock does not have."""

FOR_CPU = {"miles_async.backends.megatron.imports", "miles_async.engines.sglang.imports"}
"""What fork servers of CPU runs import; they refuse a GPU."""

BY_PATH = {"verifiers_classic", "verifiers_tasks"}
"""Ours, next to a script that another Python runs."""

OTHERS = {"arguments", "miles_async", *sys.stdlib_module_names, *ABSENT, *BY_PATH}
"""Packages whose names are not looked at."""

Names = tuple[str, ...]  # a module and attributes below it


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[Names, str, Names]]:
    """What an import asks for, and which name means what after it."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            asked = (node.module or "", alias.name)  # no import here is relative
            yield asked, alias.asname or alias.name, asked
        else:
            root = alias.name.partition(".")[0]
            yield (alias.name,), alias.asname or root, (alias.name if alias.asname else root,)


def attributes(node: ast.AST) -> tuple[str, Names] | None:
    """``a.b.c`` as a and (b, c)."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node.id, tuple(names)) if isinstance(node, ast.Name) else None


def uses(tree: ast.Module) -> Iterator[tuple[int, Names, ast.Call | None]]:
    """Lines, names of other packages, and the call if it is one."""
    known: dict[str, Names] = {}
    nodes = [*ast.walk(tree)]
    for statement in (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)):
        for asked, name, meant in imported(statement):
            if meant[0].partition(".")[0] not in OTHERS:
                known[name] = meant
                yield statement.lineno, asked, None
    for expression in (node for node in nodes if isinstance(node, ast.expr)):
        call = expression if isinstance(expression, ast.Call) else None
        found = attributes(call.func if call else expression)
        if found and found[0] in known:
            yield expression.lineno, (*known[found[0]], *found[1]), call


def problem(names: Names, call: ast.Call | None) -> str | None:
    """Why ``names`` are not there, or cannot be called so."""
    try:
        found: object = importlib.import_module(names[0])
        for name in names[1:]:
            if not (inspect.ismodule(found) or inspect.isclass(found)):
                return None
            if inspect.ismodule(found) and not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)
        if call is None:
            return None
        signature = inspect.signature(found)  # type: ignore[arg-type]
    except (AttributeError, ImportError) as error:
        return str(error)
    except (TypeError, ValueError):  # compiled functions tell no signature
        return None
    open_ended = any(isinstance(each, ast.Starred) for each in call.args) or any(not each.arg for each in call.keywords)
    given = [each for each in call.args if not isinstance(each, ast.Starred)]
    named = {each.arg: None for each in call.keywords if each.arg}
    try:
        (signature.bind_partial if open_ended else signature.bind)(*given, **named)
    except TypeError as error:
        return f"{error}, found {signature}"
    return None


def name_problems() -> Iterator[str]:
    for package in (arguments, miles_async):
        (folder,) = package.__path__
        for path in sorted(Path(folder).rglob("*.py")):
            for line, names, call in uses(ast.parse(path.read_text())):
                if why := problem(names, call):
                    yield f"{path}:{line}: {'.'.join(names)}: {why}"


def import_problems() -> Iterator[str]:
    """The launcher comes late: it hides megatron from the process."""
    names = {module.name for module in pkgutil.walk_packages(miles_async.__path__, "miles_async.")}
    for name in sorted(names - FOR_CPU, key=lambda name: (name.startswith("miles_async.engines.sglang"), name)):
        try:
            importlib.import_module(name)
        except Exception as error:  # supervision point: each module is tried
            if getattr(error, "name", None) not in ABSENT:
                yield f"{name}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    stand_in_for_transformer_engine()
    sys.argv[1:], found = ["--device=cuda"], sys.argv[1]  # the launcher looks for it
    problems = {"names": [*name_problems()], "imports": [*import_problems()]}
    Path(found).write_text(json.dumps(problems))
