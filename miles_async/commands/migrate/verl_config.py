"""Values of the file that a command line of verl names by ``--config-path`` and ``--config-name``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from miles_async.commands.migrate.shell_script import places
from miles_async.errors import ConfigurationError

_NAMED = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")
_ITS_OWN = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
"""Ends of the names of files with verl's defaults."""
_HYDRA = ("hydra", "defaults")


def configuration(words: Sequence[str], directory: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """(key, value) of the file, unless it has verl's own defaults; and a line if it is not found.

    ``directory``: the script's; the file is looked for there and in the checkout around it.
    """
    said = dict(_said(words))
    folder = said.get("--config-path", said.get("--config-dir", said.get("-cp", said.get("-cd", ""))))
    name = said.get("--config-name", said.get("-cn", "")).removesuffix(".yaml")
    if not name or name.endswith(_ITS_OWN):
        return [], []
    path = f"{folder or '.'}/{name}.yaml".removeprefix("./")
    file = next(filter(Path.is_file, places(path, directory)), None)
    if file is None:
        return [], [f"--config-name {name}: {path} was not found, so its values are missing: write them as key=value"]
    return [(key, value) for key, value in _values(file) if key.partition(".")[0] not in _HYDRA], []


def as_written(value: str) -> str:
    """A value as the table of keys has it.

    >>> as_written("true"), as_written("null"), as_written("0.1")
    ('True', 'None', '0.1')
    """
    return {"true": "True", "false": "False", "null": "None", "none": "None"}.get(value.lower(), value)


def _said(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in _NAMED:
            yield flag, (value if equals else following).strip("'\"")


def _values(file: Path) -> Iterator[tuple[str, str]]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{file}: {error}") from None
    yield from _flat("", content or {})


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list):
        yield key, f"[{','.join(map(str, value))}]"
    else:
        yield key, as_written(str(value))
