"""Paths as flags give them are relative to the working directory; workers on other nodes have another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from miles_async.arguments import Arguments, DataArguments, EvaluationArguments
from miles_async.arguments.evaluation import parse_data_sets
from miles_async.arguments.prompt_files import absolute, absolute_words

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")


def with_absolute_paths(arguments: Arguments) -> Arguments:
    """The same arguments, every path absolute."""
    groups = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    return dataclasses.replace(arguments, **{name: _absolute(group) for name, group in groups.items()})


def _absolute(group: Group) -> Group:
    if isinstance(group, EvaluationArguments) and group.eval_prompt_data is not None:
        data_sets = parse_data_sets(group.eval_prompt_data)
        words = tuple(word for name, place in data_sets.items() for word in (name, absolute(place)))
        return dataclasses.replace(group, eval_prompt_data=words)
    if isinstance(group, DataArguments) and group.prompt_data is not None:
        return dataclasses.replace(group, prompt_data=absolute_words(group.prompt_data, "--prompt-data"))
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    paths = {name: value.absolute() for name, value in values.items() if isinstance(value, Path)}
    return dataclasses.replace(group, **paths)
