"""Compare flags that describe the model or the run with the model's files and the other flags."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from miles_async.arguments import Arguments
from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.foreign.translate import Given, same
from miles_async.arguments.model_files import read_config


def check_foreign(arguments: Arguments, given: Mapping[str, Given]) -> Iterator[str]:
    """Yield a line for each flag that disagrees; ``given``: flag → its values."""
    directory = arguments.model.hf_checkpoint
    config = read_config(directory) if directory else {}
    for flag, values in given.items():
        find = FOREIGN_FLAGS[flag].fact
        fact = find(arguments, config) if find else None
        if fact is None:
            continue
        try:
            agrees = _agrees(fact.value, values)
        except ValueError as error:
            yield f"{flag}: {error}"
            continue
        if not agrees:
            yield f"{' '.join((flag, *values))}: {fact.source}; change one of them, or leave the flag out"


def _agrees(known: object, values: Given) -> bool:
    match known:
        case bool():
            return known  # a switch that was given
        case list():
            return known == layer_kinds(" ".join(values), len(known))
        case frozenset():
            return all(value in known for value in values)
    return len(values) == 1 and same(values[0], str(known))


def layer_kinds(text: str, layers: int) -> list[int]:
    """Read ``--moe-layer-freq``: 1 for layers with experts, 0 for others. Raises ValueError.

    >>> layer_kinds("[0]*2+[1]*3", 5), layer_kinds("2", 4)
    ([0, 0, 1, 1, 1], [1, 0, 1, 0])
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"expected a list such as [0]*3+[1]*58, or a number, found {text!r}") from error
    if isinstance(value, int) and value > 0:
        return [int(layer % value == 0) for layer in range(layers)]
    if not isinstance(value, list):
        raise ValueError(f"expected a list such as [0]*3+[1]*58, or a number above 0, found {text!r}")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=elements):
            return [item for element in elements if isinstance(item := _evaluate(element), int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)  # type: ignore[operator]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(left) * _evaluate(right)  # type: ignore[operator]
    raise TypeError
