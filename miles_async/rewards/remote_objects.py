"""Statements in one process call functions of a program in another: the two halves, and what passes between them.

Values are copied: numbers, texts, containers, arrays, and a few types of the standard library, each by their builtin
types, so that subclasses cannot interfere. Of other objects the judge gets a :class:`Remote`, which is never
equal to a value: expected values are compared in the judge only. The program gets callables of the judge, and can do
nothing with them but call them. Standard library only, as ``sandbox.py``.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Value = Any
"""An object of a program or of its tests: whatever they make."""

_MODULES = {*sys.stdlib_module_names, "numpy"}  # that the judge imports if the program has them
_BY_PARTS: dict[type, Callable[[Value], tuple[Value, ...]]] = {
    collections.deque: lambda value: (list(value),),
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond),
    datetime.date: lambda value: tuple(value.timetuple()[:3]),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    decimal.Decimal: lambda value: (str(value),),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    complex: lambda value: (value.real, value.imag),
}
_BY_NAME = {kind.__name__: kind for kind in _BY_PARTS}
_CONTAINERS: dict[str, Value] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


@dataclass(frozen=True, slots=True)
class Pipes:
    """Both directions to the other process. A message is 4 bytes of length and JSON."""

    read_end: int
    write_end: int

    def send(self, message: Value) -> None:
        """Write one message."""
        content = json.dumps(message).encode()
        data = len(content).to_bytes(4, "big") + content
        while data:
            data = data[os.write(self.write_end, data) :]

    def receive(self) -> Value:
        """Read one message. Raises EOFError at the end."""
        return json.loads(self._read(int.from_bytes(self._read(4), "big")))

    def _read(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            if not (chunk := os.read(self.read_end, min(1 << 16, length - len(content)))):
                raise EOFError("the other process has ended")
            content += chunk
        return bytes(content)


class Peer:
    """One half: sends requests, and serves requests of the other until its own answer arrives."""

    def __init__(self, pipes: Pipes, operations: Mapping[str, Callable[..., Value]], *, judges: bool) -> None:
        """``operations``: what the other half may call, by name. ``judges``: no incoming value is a builtin."""
        self._pipes = pipes
        self._operations = operations
        self._judges = judges
        self._lent: list[Value] = []  # objects that the other half has a handle of

    def ask(self, operation: str, *arguments: Value) -> Value:
        """Ask the other half. Raises its error if that is a builtin Exception, else RuntimeError."""
        self._pipes.send([operation, [self._encode(argument) for argument in arguments]])
        while True:
            operation, content = self._pipes.receive()
            if operation == "answer":
                return self._decode(content)
            if operation == "error":
                name, text = content
                kind = getattr(builtins, str(name), None)
                is_exception = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if is_exception else RuntimeError)(str(text))  # type: ignore[misc]
            self._answer(operation, content)

    def serve(self) -> None:
        """Answer until the other half ends."""
        while True:
            try:
                operation, content = self._pipes.receive()
            except EOFError:
                return
            self._answer(operation, content)

    def _answer(self, operation: str, content: Value) -> None:
        try:
            answer = self._operations[operation](*map(self._decode, content))
            encoded = self._encode(answer)
        except Exception as error:  # supervision point: any error is the answer
            self._pipes.send(["error", [type(error).__name__, str(error)]])
        else:
            self._pipes.send(["answer", encoded])

    def _encode(self, value: Value) -> Value:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_handle")]
        if isinstance(value, int):
            return int.__index__(value) if abs(value) < 1 << 63 else ["int", hex(value)]
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return [name, [self._encode(item) for item in kind.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[self._encode(key), self._encode(item)] for key, item in dict.items(value)]]
        for kind, parts in _BY_PARTS.items():
            if isinstance(value, kind):
                return ["value", [kind.__name__, [self._encode(part) for part in parts(value)]]]
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
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](map(self._decode, body))
        if tag == "dict":
            return {self._decode(key): self._decode(item) for key, item in body}
        if tag == "value":
            return _BY_NAME[body[0]](*map(self._decode, body[1]))
        if tag == "bytes":
            return bytes.fromhex(body)
        if tag == "array":
            return importlib.import_module("numpy").array(self._decode(body[1]), dtype=body[0])
        if tag == "module" and body.partition(".")[0] in _MODULES:
            return importlib.import_module(body)
        if tag == "int":
            return int(body, 16)
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
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __getattr__(self, name: str) -> Value:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Value) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments: Value, **named: Value) -> Value:
        return _ask(self, "call", list(arguments), named)

    def __getitem__(self, key: Value) -> Value:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Value, value: Value) -> None:
        _ask(self, "setitem", key, value)

    def __iter__(self) -> Iterator[Value]:
        iterator = _ask(self, "iter")
        while (found := _ask(iterator, "next")) is not None:
            yield found[0]

    def __next__(self) -> Value:
        if (found := _ask(self, "next")) is None:
            raise StopIteration
        return found[0]

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(_ask(self, "eq", other))

    def __hash__(self) -> int:
        return hash(_ask(self, "hash"))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is Remote and bool(_ask(self, "isinstance", instance))


def _ask(remote: Value, operation: str, *arguments: Value) -> Value:
    return object.__getattribute__(remote, "_peer").ask(operation, remote, *arguments)


def _call(function: Value, arguments: list[Value], named: dict[str, Value]) -> Value:
    return function(*arguments, **named)


def _next(iterator: Value) -> tuple[Value] | None:
    """Return the next item in a tuple, None at the end: StopIteration must not cross generators."""
    for item in iterator:
        return (item,)
    return None


def serve(source: str, pipes: Pipes) -> None:
    """Execute the program, then do what the judge asks for."""
    namespace: dict[str, Value] = {"__name__": "__main__"}
    exec(compile(source, "<program>", "exec"), namespace)
    operations: dict[str, Callable[..., Value]] = {
        "name": lambda name: namespace[name],
        "getattr": getattr,
        "setattr": setattr,
        "call": _call,
        "getitem": lambda container, key: container[key],
        "setitem": lambda container, key, value: container.__setitem__(key, value),
        "iter": iter,
        "next": _next,
        "len": len,
        "bool": bool,
        "str": str,
        "repr": repr,
        "eq": lambda one, other: one == other,
        "hash": hash,
        "isinstance": lambda kind, instance: isinstance(instance, kind),
    }
    Peer(pipes, operations, judges=False).serve()


class _Names(dict[str, Value]):
    """Globals of the statements: Python's builtins first, then their own names, then the program's."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="__main__")
        self._peer = peer

    def __missing__(self, name: str) -> Value:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            return self._peer.ask("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


def judge(statements: str, pipes: Pipes) -> None:
    """Execute the statements. Raises the error of the first that fails."""
    peer = Peer(pipes, {"call": _call}, judges=True)
    exec(compile(statements, "<tests>", "exec"), _Names(peer))
