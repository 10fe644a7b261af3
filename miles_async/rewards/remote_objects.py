"""Calls from statements in one process to functions of a program in another: the two halves and their messages.

Values are copied: numbers, texts, containers, arrays, and a few types of the standard library, each as its builtin
type. Any other object stays where it is, and the other half gets a :class:`Remote`. The judge's is never equal to a
value: expected values are compared in the judge only. The program can do nothing with the judge's objects but call
them. A message is a line of JSON. Standard library only, as ``sandbox.py``.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import operator
import sys
import types
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Any

Value = Any
"""Any object of a program or of its tests."""

_ALIASES = {"np": "numpy"}
_MODULES = {*sys.stdlib_module_names, "numpy"}  # that the judge imports if the program has them
_BY_ITEMS: dict[str, Value] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, bytearray, collections.deque)
}
_PARTS: dict[type, Callable[[Value], tuple[Value, ...]]] = {  # arguments that make an equal value
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond),
    datetime.date: lambda value: tuple(value.timetuple()[:3]),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    decimal.Decimal: lambda value: (str(value),),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    complex: lambda value: (value.real, value.imag),
}
_BY_PARTS = {kind.__name__: kind for kind in _PARTS}
_OPERATIONS: dict[str, Callable[..., Value]] = {  # on objects of the program
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "eq": operator.eq,
    "isinstance": lambda kind, instance: isinstance(instance, kind),
}


class Peer:
    """One half: sends requests, and serves requests of the other until its own answer arrives."""

    def __init__(self, pipes: tuple[int, int], operations: Mapping[str, Callable[..., Value]], *, judges: bool) -> None:
        """``pipes``: descriptors to read from and to write to. ``operations``: what the other half may request, by
        name. ``judges``: no incoming value is a builtin.
        """
        self._incoming, self._outgoing = open(pipes[0], "rb"), open(pipes[1], "wb")
        self._operations = operations
        self._judges = judges
        self._lent: list[Value] = []  # objects that the other half has a handle of

    def ask(self, operation: str, *arguments: Value) -> Value:
        """Ask the other half. Raises its error if that is a builtin Exception, else RuntimeError."""
        self._send(operation, [self._encode(argument) for argument in arguments])
        return self.serve()

    def serve(self) -> Value:
        """Serve requests until the answer to ours arrives. Raises EOFError if the other half ends before."""
        for line in self._incoming:
            operation, content = json.loads(line)
            if operation == "answer":
                return self._decode(content)
            if operation == "error":
                name, text = content
                kind = getattr(builtins, str(name), None)
                is_exception = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if is_exception else RuntimeError)(str(text))  # type: ignore[misc]
            try:
                reply = "answer", self._encode(self._operations[operation](*map(self._decode, content)))
            except Exception as error:  # supervision point: any error is the answer
                reply = "error", [type(error).__name__, str(error)]
            self._send(*reply)
        raise EOFError("the other process has ended")

    def _send(self, operation: str, content: Value) -> None:
        self._outgoing.write(json.dumps([operation, content]).encode() + b"\n")
        self._outgoing.flush()

    def _encode(self, value: Value) -> Value:
        if value is None or isinstance(value, str | float):
            return value
        if isinstance(value, Remote):
            return ["yours", value._handle]
        if isinstance(value, int):
            return value if abs(value) < 1 << 63 else ["int", hex(value)]
        for name, kind in _BY_ITEMS.items():
            if isinstance(value, kind):
                return [name, [self._encode(item) for item in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self._encode(key), self._encode(item)] for key, item in dict.items(value)]]
        for kind, parts in _PARTS.items():
            if isinstance(value, kind):
                return [kind.__name__, [self._encode(part) for part in parts(value)]]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if type(value).__module__ == "numpy":
            if type(value).__name__ == "ndarray" and value.dtype.kind in "biufc":
                return ["array", [str(value.dtype), self._encode(value.tolist())]]
            return self._encode(value.item())
        name = getattr(value, "__name__", "")
        if self._judges and getattr(builtins, name, None) is value:
            return ["builtin", name]
        self._lent.append(value)
        return ["mine", len(self._lent) - 1]

    def _decode(self, content: Value) -> Value:
        if not isinstance(content, list):
            return content
        tag, body = content
        if tag in _BY_ITEMS:
            return _BY_ITEMS[tag](map(self._decode, body))
        if tag in _BY_PARTS:
            return _BY_PARTS[tag](*map(self._decode, body))
        if tag == "dict":
            return {self._decode(key): self._decode(item) for key, item in body}
        if tag == "int":
            return int(body, 16)
        if tag == "array":
            return importlib.import_module("numpy").array(self._decode(body[1]), dtype=body[0])
        if tag == "module" and body.partition(".")[0] in _MODULES:
            return importlib.import_module(body)
        if tag == "builtin" and not self._judges:
            return getattr(builtins, body)
        if tag == "yours":
            return self._lent[body]
        if tag == "mine":
            return Remote(self, int(body))
        raise TypeError(f"expected a value, found {tag}")


class Remote:
    """An object of the other process. Operations on it run there; values it is compared with stay here."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self.__dict__.update(_peer=peer, _handle=handle)

    def __call__(self, *arguments: Value, **named: Value) -> Value:
        return self._peer.ask("call", self, list(arguments), named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._peer.ask("eq", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is Remote and bool(self._peer.ask("isinstance", self, instance))

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__array"):  # by which numpy would take memory at an address that the program says
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)


def _ask_for(operation: str) -> Callable[..., Value]:
    return lambda remote, *arguments: remote._peer.ask(operation, remote, *arguments)


for _name in ("setattr", "getitem", "setitem", "iter", "next", "len", "bool", "str", "repr", "hash"):
    setattr(Remote, f"__{_name}__", _ask_for(_name))


def fresh_main() -> dict[str, Value]:
    """Names of a new ``__main__``, the module in which dataclasses and pickle look for what a program defines.

    Programs are compiled with this file's ``from __future__``: annotations are not evaluated, as in Python 3.14, so a
    solution in the style of LeetCode may write ``List[int]`` without an import, which graders usually put before it.
    """
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    return main.__dict__


def serve(source: str, pipes: tuple[int, int]) -> None:
    """Execute the program, then serve the judge."""
    namespace = fresh_main()
    exec(compile(source, "<program>", "exec"), namespace)
    with suppress(EOFError):
        Peer(pipes, {**_OPERATIONS, "name": namespace.__getitem__}, judges=False).serve()


class _Names(dict[str, Value]):
    """Globals of the statements: Python's builtins first, then their own names, then the program's."""

    def __init__(self, peer: Peer, modules: Set[str]) -> None:
        """``modules``: names that the statements use as modules; a program's class in the place of one could agree with
        any expected value that it is given.
        """
        super().__init__(__name__="__main__")
        self._peer = peer
        self._modules = modules

    def __missing__(self, name: str) -> Value:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            found = self._peer.ask("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None
        is_module = isinstance(found, types.ModuleType) and found.__name__ == _ALIASES.get(name, name)
        if name in self._modules and not is_module:
            raise NameError(f"name {name!r} is not the module of that name")
        return found


def judge(statements: str, pipes: tuple[int, int]) -> None:
    """Execute the statements. Raises the error of the first that fails."""
    peer = Peer(pipes, {"call": _OPERATIONS["call"]}, judges=True)
    exec(compile(statements, "<tests>", "exec"), _Names(peer, _used_as_modules(statements)))


def _used_as_modules(statements: str) -> set[str]:
    """Names of modules whose attributes the statements read, and which they don't call."""
    nodes = [*ast.walk(ast.parse(statements))]
    read = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return {name for name in read - called if _ALIASES.get(name, name) in _MODULES}
