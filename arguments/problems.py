"""Several problems, one message: a user repairs them all before the next try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from miles_async.errors import ConfigurationError


def refuse(problems: Sequence[str]) -> None:
    """Raise ConfigurationError listing ``problems``, one per line; nothing if there are none."""
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        raise ConfigurationError(f"{len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in problems))


def given(flags: Mapping[str, object]) -> list[str]:
    """Those of ``flags`` whose value is true."""
    return [flag for flag, value in flags.items() if value]


def refusal(check: Callable[[], object]) -> Iterator[str]:
    """Yield the message of the ConfigurationError that ``check`` raises, if it does."""
    try:
        check()
    except ConfigurationError as error:
        yield str(error)
