"""One flag of another system, and what becomes of it here: a row of the table in ``arguments/foreign/``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from miles_async.arguments import Arguments
from miles_async.types import JsonObject

Origin = Literal["Megatron-LM", "slime, miles", "SGLang, smg", "others"]

Verdict = Literal["works", "checked", "noted", "refused"]
"""works: it sets something. checked: it must agree with what is known. noted: it has nothing to change."""

Takes = Literal["nothing", "one", "many"]
"""Values that follow a flag on the command line."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The value that a flag has to have, and the file or flag that says so."""

    value: object
    source: str  # "config.json of --hf-checkpoint says num_hidden_layers 36"


FindFact = Callable[[Arguments, JsonObject], Fact | None]
"""(arguments, config.json of the model) → fact; None if they don't say."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that is not ours and is understood all the same."""

    flag: str
    verdict: Verdict
    note: str  # works, checked: what it sets; noted: why it changes nothing; refused: why, and what to do
    _: KW_ONLY
    origin: Origin
    takes: Takes = "one"
    only: tuple[str, ...] = ()  # accepted values; any other is refused with the note. (): all are
    ours: tuple[str, ...] = ()  # works: our words in its place, followed by its values unless ``only`` has them
    fact: FindFact | None = None  # checked: what its value is compared with
    idle: Mapping[str, str] = field(default_factory=dict)  # values that change nothing → why, whatever the verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignValue:
    """A value of another system for a flag that is ours, too."""

    flag: str
    value: str
    ours: tuple[str, ...]  # our words in place of flag and value; (): refused
    note: str


def renamed(flag: str, *ours: str, origin: Origin, takes: Takes = "one", why: str = "") -> ForeignFlag:
    """A flag that is ``ours`` under another name; its values follow."""
    return ForeignFlag(flag, "works", f"is `{' '.join(ours)}`{why}", origin=origin, takes=takes, ours=ours)


def rows(
    verdict: Verdict,
    note: str,
    *,
    origin: Origin,
    one: str = "",
    switches: str = "",
    many: str = "",
    only: tuple[str, ...] = (),
) -> Iterator[ForeignFlag]:
    """Yield rows with the same note. ``one``, ``switches``, ``many``: names without ``--``, by what they take."""
    takes: dict[Takes, str] = {"one": one, "nothing": switches, "many": many}
    for count, names in takes.items():
        for name in names.split():
            yield ForeignFlag(f"--{name}", verdict, note, origin=origin, takes=count, only=only)
