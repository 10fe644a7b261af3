"""``module:attr`` → a user's object, checked against its protocol once, at start.

The attribute is a function, or a class that is instantiated without arguments. It must have the methods of the
protocol, which take its arguments and are ``async def`` where the protocol's are.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from miles_async.errors import ConfigurationError
from miles_async.runtime.own_place import own_place
from miles_async.runtime.texts import shortened

_SCRIPT = '; put what is not for importers under `if __name__ == "__main__":`'


def load_object[Kind](path: str, protocol: type[Kind], flag: str) -> Kind:
    """Load the object that ``flag`` names. Raises ConfigurationError saying what it lacks.

    >>> reward = load_object("my_package.rewards:length_penalty", Reward, "--custom-rm-path")
    """
    named = f"{flag} {path}"
    loaded = _load(path, named)
    if inspect.isclass(loaded):
        _require_no_arguments(loaded, named)
        with _users_code(f"{named}: making one"):
            loaded = loaded()
    _require(loaded, protocol, named)
    return cast(Kind, loaded)


def check_object(path: str, protocol: type, flag: str) -> None:
    """Check what :func:`load_object` would load, without instantiating it. Raises ConfigurationError."""
    named = f"{flag} {path}"
    loaded = _load(path, named)
    if inspect.isclass(loaded):
        _require_no_arguments(loaded, named)
        loaded = _unmade(loaded, named)
    _require(loaded, protocol, named)


def _require_no_arguments(made: type, named: str) -> None:
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise ConfigurationError(f"{named}: cannot make one without arguments: {error}") from error
    except ValueError:  # no signature: believed
        pass


def _unmade(made: type, named: str) -> object:
    """An object whose methods can be looked at, without a call of ``__init__``."""
    try:
        return object.__new__(made)
    except TypeError as error:  # it has abstract methods
        raise ConfigurationError(f"{named}: {error}") from error


def _require(loaded: object, protocol: type, named: str) -> None:
    if problems := list(_problems(loaded, protocol)):
        raise ConfigurationError(f"{named} is not a {protocol.__name__}: {'; '.join(problems)}")


def load_factory[Kind](path: str, make: type[Kind], made: type, flag: str) -> Kind:
    """Load the factory that ``flag`` names: a class like ``made``, or a function, which is called as ``make`` says.

    >>> make_environment = load_factory("my_package:Calculator", MakeEnvironment, Environment, "--environment-path")
    """
    named = f"{flag} {path}"
    loaded = _load(path, named)
    problems = [*_problems(loaded, make)]
    if inspect.isclass(loaded):
        problems += _problems(_unmade(loaded, named), made)
    if problems:
        raise ConfigurationError(f"{named} makes no {made.__name__}: {'; '.join(problems)}")
    return cast(Kind, loaded)


def load_instance[Kind](path: str, kind: type[Kind], flag: str) -> Kind:
    """Load the object of class ``kind`` that ``flag`` names. Raises ConfigurationError.

    >>> spec = load_instance("my_package.transports:SPEC", TransportSpec, "--weight-transport")
    """
    named = f"{flag} {path}"
    loaded = _load(path, named)
    if not isinstance(loaded, kind):
        raise ConfigurationError(f"{named}: expected a {kind.__name__}, found {type(loaded).__name__}")
    return loaded


def _load(path: str, named: str) -> object:
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute.isidentifier()):
        raise ConfigurationError(f"{named}: expected module:attr, such as my_package.my_module:my_function")
    return _attribute(_module(module_name, named), attribute, named)


def _module(name: str, named: str) -> ModuleType:
    try:
        with _users_code(f"{named}: importing {name}", passes=ModuleNotFoundError, exits=_SCRIPT):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            file = f"; a module's name has no .py: {Path(name).stem}" if name.endswith(".py") else ""
            raise ConfigurationError(
                f"{named}: there is no module {error.name!r}{file}; put the directory that holds it into PYTHONPATH "
                "(it reaches every Ray worker, see --forward-env)"
            ) from None
        raise ConfigurationError(f"{named}: importing {name} failed{_place(error)}: {error}") from error


@contextmanager
def _users_code(doing: str, *, passes: type[Exception] | tuple[()] = (), exits: str = "") -> Iterator[None]:
    """Turn whatever user code raises into ConfigurationError, except ``passes`` and Ctrl-C.

    ``exits``: advice for code that ends the process.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except passes:
        raise
    except SystemExit as error:  # it would end this process without a word
        text = f"it called sys.exit({shortened(repr(error.code))}){exits}"
        raise ConfigurationError(f"{doing} failed{_place(error)}: {text}") from error
    except BaseException as error:  # supervision point: pytest.skip, for instance, raises no Exception
        text = shortened(f"{type(error).__name__}: {error}")
        raise ConfigurationError(f"{doing} failed{_place(error)}: {text}") from error


def _place(error: BaseException) -> str:
    """`` at FILE:LINE``: the innermost line of the user's own code, else of the library that raised."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" at {error.filename}:{error.lineno}"
    if own := own_place(error):
        return own
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if Path(frame.filename).parent.name != "importlib"]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames[-1:])


def _attribute(module: ModuleType, attribute: str, named: str) -> object:
    try:
        with _users_code(f"{named}: reading {attribute}", passes=AttributeError):  # a module may have ``__getattr__``
            return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        nearest = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigurationError(f"{named}: {module.__name__} has no {attribute!r}{hint}") from None


def _problems(loaded: object, protocol: type) -> Iterator[str]:
    for name, expected in _methods(protocol).items():
        called = inspect.isroutine(loaded) or inspect.isclass(loaded)
        found = loaded if name == "__call__" and called else getattr(loaded, name, None)
        if not callable(found):
            yield (
                f"it cannot be called (found {type(loaded).__name__})" if name == "__call__" else f"it has no {name}()"
            )
            continue
        label = "it" if name == "__call__" else f"{name}()"
        if inspect.iscoroutinefunction(expected) != _is_async(found):
            yield f"{label} must {'' if inspect.iscoroutinefunction(expected) else 'not '}be `async def`"
        if takes := _arity_problem(found, expected):
            yield f"{label} must take {takes}"


def _methods(protocol: type) -> dict[str, Callable[..., object]]:
    return {
        name: member
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
    }


def _is_async(found: object) -> bool:
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004


def _arity_problem(found: Callable[..., object], expected: Callable[..., object]) -> str | None:
    """The expected parameters, if ``found`` cannot be called the way the protocol is, or would take them for others."""
    parameters = list(inspect.signature(expected).parameters.values())[1:]  # without self
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    wanted = f"({', '.join([*positional, *(f'{name}=' for name in keywords)])})"
    try:
        signature = inspect.signature(found)
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return wanted
    except ValueError:  # a builtin without a signature: believed
        return None
    first = next(iter(signature.parameters.values()), None)
    if len(positional) > 1 and first is not None and first.name == "args" and first.kind is not first.VAR_POSITIONAL:
        return f"{wanted}, and takes (args, ...), as slime's hooks do: docs/extending/README.md has a wrapper"
    return None
