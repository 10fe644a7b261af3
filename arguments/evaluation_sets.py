"""Held-out data sets, each with its own settings: of ``--eval-prompt-data``, and of the file of ``--eval-config``.

>>> # as slime has it; every key but name and path may stand under defaults, too
>>> # eval:
>>> #   defaults:
>>> #     max_response_len: 8192
>>> #   datasets:
>>> #     - name: aime
>>> #       path: data/aime-2025.jsonl
>>> #       n_samples_per_eval_prompt: 16
>>> #       temperature: 0.6
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from miles_async.arguments.data import DataArguments
from miles_async.arguments.evaluation import EvaluationArguments, parse_data_sets
from miles_async.arguments.prompt_files import HUB, named_places
from miles_async.arguments.rewards import RewardArguments, parse_rm_type
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.specification import MODULE_ATTR
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

Count = Annotated[int, msgspec.Meta(ge=1)]


class EvaluationSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set. None: as flags say."""

    name: str
    path: str  # as --prompt-data takes one
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    metadata_overrides: JsonObject = {}  # added to the metadata of every prompt; these win
    rm_type: str | None = None
    custom_rm_path: str | None = None
    group_rm_path: str | None = None
    n_samples_per_eval_prompt: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    stop: tuple[str, ...] | None = None
    max_prompt_len: Count | None = None
    max_response_len: Count | None = None
    interval: Count | None = None  # rollout steps between evaluations
    engines: Literal["train", "evaluation"] | None = None  # None: those for evaluation if there are any

    def due(self, evaluation: EvaluationArguments, step: int, *, last: bool) -> bool:
        """Return whether it is evaluated after ``step`` rollout steps; ``last``: these are all."""
        interval = self.interval or evaluation.eval_interval
        return step == 0 or last or (interval is not None and step % interval == 0)

    def samples(self, evaluation: EvaluationArguments) -> int:
        """Samples per prompt."""
        return self.n_samples_per_eval_prompt or evaluation.n_samples_per_eval_prompt

    def temperature_in_force(self, evaluation: EvaluationArguments, rollout: RolloutArguments) -> float:
        """Greedy by default; training's with several samples per prompt."""
        for given in (self.temperature, evaluation.eval_temperature):
            if given is not None:
                return given
        return rollout.rollout_temperature if self.samples(evaluation) > 1 else 0.0

    def sampling(self, evaluation: EvaluationArguments, rollout: RolloutArguments) -> JsonObject:
        """SGLang's parameters that differ from training's."""
        found: dict[str, Any] = {
            "temperature": self.temperature_in_force(evaluation, rollout),
            "top_p": evaluation.eval_top_p if self.top_p is None else self.top_p,
            "top_k": evaluation.eval_top_k if self.top_k is None else self.top_k,
            "max_new_tokens": self.response_length(evaluation, rollout)[1],
        }
        return found if self.stop is None else {**found, "stop": list(self.stop)}

    def response_length(self, evaluation: EvaluationArguments, rollout: RolloutArguments) -> tuple[str, int]:
        """(What says so, tokens that a response may have)."""
        if self.max_response_len is not None:
            return f"max_response_len of {self.name} in --eval-config", self.max_response_len
        if evaluation.eval_max_response_len is not None:
            return "--eval-max-response-len", evaluation.eval_max_response_len
        return "--rollout-max-response-len", rollout.rollout_max_response_len

    def data(self, data: DataArguments) -> DataArguments:
        """Flags of its prompts, derived from training's."""
        keys = {name: value for name in KEYS if (value := getattr(self, name)) is not None}
        limit = self.max_prompt_len or data.rollout_max_prompt_len
        alone = replace(data, prompt_data=(self.path,), prompt_data_weights=(), rollout_max_prompt_len=limit)
        return replace(alone, prompt_sampler="uniform", pass_rates=(), **keys)

    def rewards(self, rewards: RewardArguments) -> RewardArguments:
        """Flags of its reward, derived from training's."""
        own = {name: getattr(self, name) for name in REWARDS}
        return replace(rewards, **own) if self.names_reward else rewards

    @property
    def names_reward(self) -> bool:
        """True if it has a separate reward."""
        return any(getattr(self, name) is not None for name in REWARDS)


KEYS = ("input_key", "label_key", "metadata_key", "tool_key")
REWARDS = ("rm_type", "custom_rm_path", "group_rm_path")
_FIELDS = tuple(field.name for field in msgspec.structs.fields(EvaluationSet))
_REFUSED = {
    "min_new_tokens": "an answer ends where the model ends it",
    "stop_token_ids": "engines end at the tokens that generation_config.json names; texts are stop",
    "custom_generate_function_path": "held-out prompts are answered as in training",
    "prompt_key": "its name here is input_key",
}
"""Keys of slime's that are not here, and why."""


def evaluation_sets(evaluation: EvaluationArguments) -> tuple[EvaluationSet, ...]:
    """All held-out data sets. Raises ConfigurationError naming flag, file and key."""
    flags = parse_data_sets(evaluation.eval_prompt_data or ())
    found = [EvaluationSet(name=name, path=path) for name, path in flags.items()]
    if evaluation.eval_config is not None:
        found += read_eval_config(evaluation.eval_config)
    names = [each.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigurationError(f"--eval-config {evaluation.eval_config}: {twice[0]} is the name of two data sets")
    return tuple(found)


def readable_sets(evaluation: EvaluationArguments) -> tuple[EvaluationSet, ...]:
    """As :func:`evaluation_sets`; empty instead of its error, which ``check_data_sets`` reports."""
    try:
        return evaluation_sets(evaluation)
    except ConfigurationError:
        return ()


def read_eval_config(path: Path) -> list[EvaluationSet]:
    """Data sets of a YAML or JSON file. Paths in it are relative to its folder.

    Raises ConfigurationError naming file, data set and key.
    """
    where = f"--eval-config {path}"
    content = _read(path, where)
    content = content.get("eval", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not content.get("datasets"):
        raise ConfigurationError(f"{where}: expected eval: with datasets: in it, found {_shown(content)}")
    if unknown := sorted(map(str, content.keys() - {"defaults", "datasets"})):
        raise ConfigurationError(f"{where}: expected defaults and datasets under eval, found {unknown[0]} as well")
    defaults = content.get("defaults") or {}
    _check_keys(defaults, f"{where}: defaults", without=("name", "path"))
    return [_data_set({**defaults, **given}, path.parent, place) for given, place in _given(content["datasets"], where)]


def _read(path: Path, where: str) -> Any:
    import yaml

    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes())
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{where}: expected a YAML or JSON file: {error}") from error


def _given(data_sets: Any, where: str) -> Iterator[tuple[JsonObject, str]]:
    """(keys of a data set, its place for messages): a list of them, or an object with their names."""
    if isinstance(data_sets, Mapping):
        data_sets = [
            {"name": str(name), **given} if isinstance(given, Mapping) else given for name, given in data_sets.items()
        ]
    if not isinstance(data_sets, list):
        raise ConfigurationError(f"{where}: expected datasets to be a list, found {_shown(data_sets)}")
    for number, given in enumerate(data_sets):
        place = f"{where}: datasets[{number}]"
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{place}: expected name, path and settings, found {_shown(given)}")
        named = f" ({given['name']})" if isinstance(given.get("name"), str) else ""
        _check_keys(given, place + named)
        yield dict(given), place + named


def _check_keys(given: Any, place: str, without: tuple[str, ...] = ()) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{place}: expected settings, found {_shown(given)}")
    for key in given:
        if reason := _REFUSED.get(key):
            raise ConfigurationError(f"{place}: {key} does not exist here: {reason}")
        if key not in _FIELDS or key in without:
            names = [name for name in _FIELDS if name not in without]
            hint = did_you_mean(key, names) or f"; known are {', '.join(names)}"
            raise ConfigurationError(f"{place}: unknown key {key!r}{hint}")


def _data_set(given: JsonObject, folder: Path, place: str) -> EvaluationSet:
    named = {**given, "stop": [given["stop"]]} if isinstance(given.get("stop"), str) else given
    try:
        found = msgspec.convert({key: value for key, value in named.items() if value is not None}, EvaluationSet)
    except msgspec.ValidationError as error:
        key = re.search(r"`\$\.(\w+)", str(error))
        at = f"{key[1]}: " if key else ""
        raise ConfigurationError(f"{place}: {at}{str(error).partition(' - at ')[0]}") from None
    if not re.fullmatch(r"[\w.\-]+", found.name):
        raise ConfigurationError(f"{place}: name: expected letters, digits and . - _, found {found.name!r}")
    path = found.path
    if not path.startswith(HUB):
        path = os.path.join(folder, os.path.expanduser(path))
    try:
        named_places([path], "path")
        parse_rm_type(found.rm_type or "")
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None
    if found.rm_type is not None and found.custom_rm_path is not None:
        raise ConfigurationError(f"{place}: rm_type and custom_rm_path: give one of them")
    for name in ("custom_rm_path", "group_rm_path"):
        if (hook := getattr(found, name)) is not None and not re.fullmatch(MODULE_ATTR, hook):
            raise ConfigurationError(f"{place}: {name}: expected module:attr, found {hook!r}")
    return msgspec.structs.replace(found, path=path)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
