"""Carry functions and classes of this program, also of a notebook, to the processes of a run.

What other processes can import is named as ``module:attr``. The rest is written into the run directory as a module
that loads it, so that for the run it is a ``module:attr``, too. It runs where hooks run: on the driver's machine.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.runtime.files.run_directory import CODE_DIRECTORY
from miles_async.runtime.texts import shortened

MODULE = "miles_async_carried"
LARGEST_MIB = 64

HOOKS: Mapping[str, tuple[str, ...]] = {
    "reward": ("--rm-type", "none", "--custom-rm-path"),
    "group_reward": ("--group-rm-path",),
    "environment": ("--environment-path",),
    "agent": ("--agent-path",),
    "generate": ("--custom-generate-function-path",),
    "group_filter": ("--group-filter-path",),
}
"""Argument of ``miles_async.start`` → the words before its ``module:attr``."""

_LOADER = '''"""Objects that a program gave to miles_async.start. Loaded by the processes of the run."""

import pickle
from pathlib import Path

globals().update(pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes()))
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Hooks of a run as flags, and the code of hooks that no other process can import."""

    words: tuple[str, ...]
    code: bytes  # a pickled dict, argument → object; empty if every hook can be imported

    def write(self, run_dir: Path) -> None:
        """Write the code, if there is any, into the run directory."""
        if self.code:
            directory = run_dir / CODE_DIRECTORY
            shutil.rmtree(directory, ignore_errors=True)  # of a start that was killed
            directory.mkdir(parents=True)
            (directory / f"{MODULE}.py").write_text(_LOADER)
            (directory / f"{MODULE}.pickle").write_bytes(self.code)


def carry(hooks: Mapping[str, object]) -> Carried:
    """Make flags of the hooks that are given. Raises ConfigurationError: one cannot be carried.

    ``hooks``: argument of ``miles_async.start`` → function, class, object with the methods of the protocol, or
    ``module:attr``; None if it is not given.
    """
    given = {name: hook for name, hook in hooks.items() if hook is not None}
    references = {name: _reference(hook) for name, hook in given.items()}
    rest = {name: given[name] for name, reference in references.items() if reference is None}
    words = (word for name, path in references.items() for word in (*HOOKS[name], path or f"{MODULE}:{name}"))
    return Carried(words=tuple(words), code=_pickled(rest) if rest else b"")


def by_argument(text: str) -> str:
    """Replace the flags of carried hooks by the arguments that carried them, in an error of the run.

    >>> by_argument("--custom-rm-path miles_async_carried:reward is not a Reward: it must be `async def`")
    'reward=... is not a Reward: it must be `async def`'
    """
    for name, words in HOOKS.items():
        text = text.replace(f"{words[-1]} {MODULE}:{name}", f"{name}=...")
    return text


def _reference(hook: object) -> str | None:
    """``module:attr`` of what another process can import; None of the rest."""
    if isinstance(hook, str):
        return hook
    module, name = getattr(hook, "__module__", None), getattr(hook, "__qualname__", "")
    named = inspect.isroutine(hook) or inspect.isclass(hook)
    found = sys.modules.get(module) if named and isinstance(module, str) and module != "__main__" else None
    has_file = getattr(found, "__file__", None) is not None
    return f"{module}:{name}" if has_file and getattr(found, name, None) is hook else None


def _pickled(hooks: Mapping[str, object]) -> bytes:
    from ray import cloudpickle  # a second: Ray comes with it

    for name, hook in hooks.items():
        shown = f"{name}={shortened(repr(hook))}"
        instead = f'put it into a module and give its name: {name}="my_module:{getattr(hook, "__name__", "my_hook")}"'
        try:
            size = len(cloudpickle.dumps(hook))
        except Exception as error:  # pickling calls code of the objects that the hook refers to
            why = shortened(f"{type(error).__name__}: {error}")
            raise ConfigurationError(
                f"{shown} cannot be carried to the processes of the run: {why}. Open files, connections, locks and "
                "the like when it is called, not before; or " + instead
            ) from error
        if size > LARGEST_MIB << 20:
            raise ConfigurationError(
                f"{shown} refers to {size >> 20} MiB of data: expected at most {LARGEST_MIB} MiB, since it is carried "
                "to the processes of the run. Read the data from a file where it is called; or " + instead
            )
    return bytes(cloudpickle.dumps(dict(hooks)))
