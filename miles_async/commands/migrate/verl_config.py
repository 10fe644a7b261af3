"""Values of the file that a command line of verl names by ``--config-path`` and ``--config-name``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from miles_async.commands.migrate.shell_script import places
from miles_async.errors import ConfigurationError

_SHORT = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}
_ITS_OWN = re.compile(r"(?:(?:fully_async|one_step_off|transfer_queue)_)?(?:ppo|dapo)_(?:megatron_)?trainer")
"""Names of files with verl's defaults."""
_ITS_FOLDER = re.compile(r"(?:\./)?(?:config)?|(?:.*/)?verl[/.].*")


def configuration(words: Sequence[str], directory: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """(key, value) of the file, unless it has verl's own defaults; and what of it could not be read.

    ``directory``: the script's; the file is looked for there and in the checkout around it.
    """
    said = dict(_said(words))
    folder = said.get("--config-path", said.get("--config-dir", ""))
    name = said.get("--config-name", "ppo_trainer" if "--config-path" in said else "").removesuffix(".yaml")
    if not name or (_ITS_OWN.fullmatch(name) and _ITS_FOLDER.fullmatch(folder)):
        return [], []
    path = f"{folder or '.'}/{name}.yaml".removeprefix("./")
    file = next(filter(Path.is_file, places(path, directory)), None)
    if file is None:
        return [], [f"--config-name {name}: {path} was not found, so its values are missing: write them as key=value"]
    problems = list[str]()
    return list(_values(file, problems)), problems


def as_written(value: str) -> str:
    """A value as the table of keys has it.

    >>> as_written("true"), as_written("null"), as_written("0.1")
    ('True', 'None', '0.1')
    """
    return {"true": "True", "false": "False", "null": "None", "none": "None"}.get(value.lower(), value)


def _said(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if (flag := _SHORT.get(flag, flag)) in _SHORT.values():
            yield flag, (value if equals else following).strip("'\"")


def _values(file: Path, problems: list[str], within: Sequence[Path] = ()) -> Iterator[tuple[str, str]]:
    """Values of the files in its list of defaults, where verl's own are left out, then of the file.

    ``within``: files whose lists name it.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file}: expected keys with values")
    content.pop("hydra", None)
    for entry in content.pop("defaults", None) or []:
        other = file.parent / f"{entry}.yaml"
        if entry == "_self_" or "hydra/" in str(entry) or (isinstance(entry, str) and _ITS_OWN.fullmatch(entry)):
            continue
        if isinstance(entry, str) and other.is_file() and other not in (*within, file):
            yield from _values(other, problems, (*within, file))
        else:
            problems.append(f"{file.name}: {entry} of its defaults was not read: write its values as key=value")
    yield from _flat("", content)


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list):
        yield key, f"[{','.join(map(str, value))}]"
    else:
        yield key, as_written(str(value))
