"""Every one-point mutant of a source file: one operator, constant, call or condition changed, as in a slip of the pen.

Left out is what no test of behaviour can see: annotations, decorators, log lines, messages, and ``strict=True`` of
``zip``, which states what the code around it has made sure of.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
EXACT_OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """The bytes from ``start`` to ``end`` of a file replaced by ``new``."""

    kind: str
    line: int
    start: int
    end: int
    new: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new + source[self.end :]

    def changed_lines(self, source: bytes) -> tuple[str, str]:
        """The source lines that the mutant touches, as they are and as it makes them."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        last = len(source) if last < 0 else last
        after = source[first : self.start] + self.new + source[self.end : last]
        return source[first:last].decode().strip(), after.decode().strip()


def find_mutants(source: bytes) -> list[Mutant]:
    """All mutants of a source file, in the order of their places."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for kind, node, changed in _changes(ast.parse(source)):
        mutants.append(
            Mutant(
                kind=kind,
                line=node.lineno,
                start=starts[node.lineno - 1] + node.col_offset,
                end=starts[node.end_lineno - 1] + node.end_col_offset,
                new=changed.encode(),
            )
        )
    return sorted(mutants, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node to be replaced, its new text) for everything below a node."""
    if isinstance(node, ast.JoinedStr) or _is_log_call(node) or _is_type_checking(node):
        return
    yield from _node_changes(node)
    skipped = {"annotation", "returns", "decorator_list"} | ({"keywords"} if isinstance(node, ast.ClassDef) else set())
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and name not in skipped and not is_strict:
                yield from _changes(child)


def _node_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                changed = copy.copy(node)
                changed.ops = [*node.ops[:place], COMPARISONS[type(operator)](), *node.ops[place + 1 :]]
                yield "comparison", node, ast.unparse(changed)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean operator", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            changed = ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
            yield "arithmetic", node, f"({ast.unparse(changed)})"
        case ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))
        case ast.Constant(value=bool()):
            yield "constant", node, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", node, str(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITE_CALLS:
            yield "opposite call", node.func, OPPOSITE_CALLS[name]
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "dropped call", node, "pass"
    conditions = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
    conditions += node.ifs if isinstance(node, ast.comprehension) else []
    for test in conditions:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], EXACT_OPPOSITES):
            continue  # the mutant of the comparison is the same
        negated = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
        yield "negated condition", test, ast.unparse(negated) if negated else f"not ({ast.unparse(test)})"


def _is_log_call(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGGERS
    return False


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
