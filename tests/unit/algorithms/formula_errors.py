"""Small errors in formulas: any one expression of a module, made wrong by a factor of 1.001 while a test runs.

Every expression is wrapped in a call that passes its value on, except for the one that is wrong at the time. What
metrics are made of is left alone unless asked for: a dictionary and what is in it. So is what a factor cannot change,
such as a sign.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch

FACTOR = 1.001
WRAPPER = "_with_error"


@dataclass
class Errors:
    """The expressions of a module whose functions are instrumented, and which of them is wrong now."""

    expressions: list[str] = field(default_factory=list)  # "line: source"
    wrong: int | None = None
    reached: set[int] = field(default_factory=set)  # expressions that had a value which the factor changes

    def pass_on(self, number: int, value: Any) -> object:
        is_real = isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())
        if not is_real:
            return value
        changed = value * FACTOR
        if bool(torch.as_tensor(changed != value).any()):
            self.reached.add(number)
        return changed if number == self.wrong else value

    @contextlib.contextmanager
    def in_expression(self, number: int) -> Iterator[None]:
        self.wrong = number
        try:
            yield
        finally:
            self.wrong = None


def unnoticed(module: ModuleType, agrees: Callable[[], bool], *, metrics: bool = False) -> list[str]:
    """The expressions whose errors leave ``agrees()`` true, which it must be without any. ``metrics``: as below."""
    with instrumented(module, metrics=metrics) as errors:
        assert agrees()
        found = []
        for number in sorted(errors.reached):
            with errors.in_expression(number):
                if agrees():
                    found.append(errors.expressions[number].split(": ", 1)[1])
    return found


@contextlib.contextmanager
def instrumented(module: ModuleType, *, metrics: bool = False) -> Iterator[Errors]:
    """Let any expression in the functions and methods of ``module`` be made wrong, wherever they are called from.

    ``metrics``: dictionaries, too.
    """
    errors, source = Errors(), inspect.getsource(module)
    tree = _Wrap(source, errors, metrics=metrics).visit(ast.parse(source))
    namespace: dict[str, object] = {"__name__": module.__name__}
    exec(compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec"), namespace)
    changed, originals = dict(_functions(namespace, module)), dict(_functions(vars(module), module))
    kept = {name: function.__code__ for name, function in originals.items()}
    setattr(module, WRAPPER, errors.pass_on)
    try:
        for name, function in originals.items():
            function.__code__ = changed[name].__code__
        yield errors
    finally:
        for name, function in originals.items():
            function.__code__ = kept[name]
        delattr(module, WRAPPER)


def _functions(namespace: Mapping[str, object], module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for value in list(namespace.values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value.__qualname__, value
        elif inspect.isclass(value):
            for attribute in vars(value).values():
                function = getattr(attribute, "__func__", attribute)
                if isinstance(function, FunctionType) and function.__qualname__.startswith(value.__name__):
                    if "<" not in function.__code__.co_filename:  # not what dataclasses generate
                        yield function.__qualname__, function


class _Wrap(ast.NodeTransformer):
    def __init__(self, source: str, errors: Errors, *, metrics: bool) -> None:
        self._source, self._errors, self._metrics, self._inside = source, errors, metrics, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._inside = self._inside, True
        node.body = [self.visit(statement) for statement in node.body]
        self._inside = outer
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        return self.generic_visit(node) if self._metrics else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Whether something is None, or what sign it has, does not depend on the factor."""
        other = node.comparators[0]
        if isinstance(node.ops[0], ast.Is | ast.IsNot) or (isinstance(other, ast.Constant) and other.value == 0):
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return node if node.attr in ("dtype", "shape") else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self._inside and node.value is not None:
            node.value = self.visit(node.value)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        text = ast.get_source_segment(self._source, node) if isinstance(node, ast.expr) else None
        super().generic_visit(node)
        if not (self._inside and isinstance(node, ast.Name | ast.Attribute | ast.BinOp | ast.UnaryOp | ast.Call)):
            if not (self._inside and isinstance(node, ast.Constant) and isinstance(node.value, float)):
                return node
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return node
        number = len(self._errors.expressions)
        self._errors.expressions.append(f"{node.lineno}: {text}")
        return ast.copy_location(
            ast.Call(func=ast.Name(WRAPPER, ast.Load()), args=[ast.Constant(number), node], keywords=[]), node
        )
