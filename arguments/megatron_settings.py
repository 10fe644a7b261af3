"""``--megatron-X`` as values for Megatron's configs, checked against the fields that the installed version has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_async.arguments.megatron_fields import ConfigName, FieldValue, MegatronField, megatron_fields
from miles_async.arguments.pass_through import Collector, unflatten
from miles_async.arguments.problems import refuse

WHERE = Collector("model", "megatron_extra")
CLOSE_NAME = 0.8

Values = dict[str, FieldValue | list[FieldValue]]
"""Field → value; dtypes and enumerations by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSettings:
    """Fields that the user sets, by config."""

    provider: Values = field(default_factory=dict)
    optimizer: Values = field(default_factory=dict)
    ddp: Values = field(default_factory=dict)

    def of(self, config: ConfigName) -> Values:
        return {"provider": self.provider, "optimizer": self.optimizer, "ddp": self.ddp}[config]


def megatron_settings(extra: Sequence[str]) -> MegatronSettings:
    """Read ``ModelArguments.megatron_extra``. Raises ConfigurationError naming every flag that cannot be set so."""
    settings = MegatronSettings()
    if not extra:
        return settings
    fields, problems = megatron_fields(), list[str]()
    for flag, words in unflatten({WHERE: extra}):
        name = flag.removeprefix("--megatron-").replace("-", "_")
        if name not in fields:
            problems.append(_unknown(flag, name, fields))
            continue
        try:
            value = fields[name].parse(words)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
            continue
        for config in fields[name].configs:
            settings.of(config)[name] = value
    refuse(problems)
    return settings


def _unknown(flag: str, name: str, fields: Mapping[str, MegatronField]) -> str:
    if not fields:
        return f"{flag}: Megatron-core and Megatron-Bridge are not installed here, so that nobody knows it"
    near = difflib.get_close_matches(name, fields, n=1, cutoff=CLOSE_NAME)
    hint = f"did you mean {fields[near[0]].flag}?" if near else "`miles-async train --help-megatron` lists them"
    return f"{flag}: Megatron's configs have no field {name}; {hint}"


def fields_table() -> str:
    """Text of ``--help-megatron``."""
    lines = [
        "Fields of Megatron's configs, by the installed version: --megatron-X VALUE sets one, and a switch needs no",
        "value (--megatron-X false turns it off). --X is taken as --megatron-X if it is no other flag. Several values",
        "are a list. Default as in Megatron's source: Megatron-Bridge chooses others by the model.",
        "",
    ]
    for item in megatron_fields().values():
        if item.owner is None and item.type is not None:
            lines.append(f"{item.flag} {item.type}  (default: {item.default}; {', '.join(item.configs)})")
            lines += [f"    {item.about}"] if item.about else []
    lines += ["", "Not set directly:"]
    for item in megatron_fields().values():
        if item.owner is not None:
            lines.append(f"{item.flag}: {item.owner}")
    return "\n".join(lines) + "\n"
