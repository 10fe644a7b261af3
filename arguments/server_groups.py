"""Groups of engines: one from flags, or several from the file of ``--server-groups``.

>>> # fleet.toml
>>> # [groups.train]
>>> # engines = 6
>>> # [groups.eval]
>>> # role = "evaluation"
>>> # [groups.judge]
>>> # role = "frozen"
>>> # model = "models/judge"
>>> # port = 8400
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import readable_sets
from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.words import looks_like_flag
from miles_async.errors import ConfigurationError

DEFAULT_GROUP = "engine"

Role = Literal["train", "evaluation", "frozen"]


class ServerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines that are alike; one table of the file, ``[groups.NAME]``."""

    name: str = ""  # the table's
    # train: generates for training, gets every version. evaluation: generates for evaluation, gets the version that is
    # evaluated. frozen: keeps the weights that it started with: a judge that rewards ask, or the teacher of --use-opd.
    role: Role = "train"
    engines: int = 1
    gpus_per_engine: int = 1  # its tensor-parallel size
    nodes_per_engine: int = 1  # over which these are spread evenly
    model: str | None = None  # frozen: a Hugging Face directory, if it is not --hf-checkpoint
    port: int | None = None  # frozen: of its router, where rewards ask
    sglang: dict[str, str | int | float | bool] = {}  # SGLang's own arguments for these engines; they win, false too
    external: tuple[str, ...] = ()  # host:port of servers that are up already, instead of ``engines``

    @property
    def num_engines(self) -> int:
        """Owned or external."""
        return len(self.external) or self.engines

    @property
    def sglang_extra(self) -> tuple[str, ...]:
        """Extra arguments in SGLang's form."""
        return tuple(
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in self.sglang.items()
            if value is not False
        )

    def shared_extra(self, arguments: Arguments) -> tuple[str, ...]:
        """Arguments of ``--sglang-*`` that these engines get before their own: those that ``sglang`` makes no false."""
        words, kept = [], True
        for word in arguments.engines.sglang_extra:
            if looks_like_flag(word):
                kept = self.sglang.get(word.partition("=")[0].removeprefix("--")) is not False
            words += [word] if kept else []
        return tuple(words)

    def all_extra(self, arguments: Arguments) -> tuple[str, ...]:
        """All arguments of SGLang's that flags and file give these engines; the last one wins."""
        return (*self.shared_extra(arguments), *self.sglang_extra)


def server_groups(arguments: Arguments) -> tuple[ServerGroup, ...]:
    """Return all groups of a run. Raises ConfigurationError naming file and key."""
    if arguments.engines.server_groups is not None:
        return read_server_groups(arguments.engines.server_groups)
    cluster = arguments.cluster
    return (
        ServerGroup(
            name=DEFAULT_GROUP,
            engines=1 if arguments.engines.rollout_external else cluster.num_engines,
            gpus_per_engine=cluster.rollout_num_gpus_per_engine,
            nodes_per_engine=cluster.rollout_num_nodes_per_engine,
            external=arguments.engines.rollout_external,
        ),
    )


def read_server_groups(path: Path) -> tuple[ServerGroup, ...]:
    """Raises ConfigurationError naming file and key."""
    where = f"--server-groups {path}"
    try:
        content = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, object]]])
        if set(content) != {"groups"}:
            raise ConfigurationError(f"{where}: expected tables [groups.NAME], found {', '.join(content) or 'none'}")
        groups = []
        for name, table in content["groups"].items():
            where = f"--server-groups {path}: [groups.{name}]"
            group = msgspec.convert({**table, "name": name}, ServerGroup)
            for option in group.sglang:
                if row := FOREIGN_FLAGS.get(f"--sglang-{option}"):
                    raise ConfigurationError(f"{where}: sglang may not have {option}: {row.note}")
            model = group.model and str(Path(os.path.expanduser(group.model)).absolute())
            groups.append(msgspec.structs.replace(group, model=model))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return tuple(groups)


def has_attention_groups(words: Sequence[str]) -> bool:
    """True if these arguments of SGLang's ask for data-parallel attention."""
    return any(word.partition("=")[0] in ("--attn-dp-size", "--enable-dp-attention") for word in words)


def of_role(groups: Sequence[ServerGroup], role: Role) -> tuple[ServerGroup, ...]:
    """Groups with this role."""
    return tuple(group for group in groups if group.role == role)


def pinned_versions(arguments: Arguments) -> int:
    """Most versions of the weights that are in use beyond the newest: a repair's, and that of a separate evaluation."""
    return 2 if of_role(server_groups(arguments), "evaluation") else 1


def teacher_group(arguments: Arguments) -> ServerGroup:
    """Return the frozen group that --use-opd learns from. Raises ConfigurationError."""
    frozen = {group.name: group for group in of_role(server_groups(arguments), "frozen")}
    named = arguments.algorithm.opd_teacher
    if named is None and len(frozen) == 1:
        return next(iter(frozen.values()))
    if named is None or named not in frozen:
        found = ", ".join(frozen) or "none"
        asked = "--use-opd" if named is None else f"--opd-teacher {named}"
        raise ConfigurationError(
            f'{asked}: expected a group with role = "frozen" in --server-groups, the teacher\'s, found {found}; '
            + ("name one with --opd-teacher" if frozen else "add one")
        )
    return frozen[named]


def given_sglang_flags(arguments: Arguments, group: ServerGroup) -> dict[str, str]:
    """SGLang's own flags of a group → the word after each, a switch's too; the last one wins."""
    words = [part for word in group.all_extra(arguments) for part in word.split("=", 1)]
    return {name: value for name, value in pairwise([*words, ""]) if name.startswith("--")}


def attention_groups(flags: Mapping[str, str]) -> int:
    """Groups of an engine's GPUs that each compute attention for other requests; 1 without data-parallel attention.

    ``flags``: of :func:`given_sglang_flags`.
    """
    return sglang_number(flags, "--dp-size" if "--enable-dp-attention" in flags else "--attn-dp-size") or 1


def sglang_number(flags: Mapping[str, str], *names: str) -> int:
    """Number that one of SGLang's flags gives, which has several names; 0 without, or where SGLang will refuse it."""
    word = next((flags[name] for name in names if name in flags), "")
    return int(word) if word.isdecimal() else 0


def context_lengths(arguments: Arguments) -> list[int]:
    """Tokens of context of the engines that get weights, where flags of SGLang say so, by group."""
    groups = [group for group in server_groups(arguments) if group.role != "frozen" and not group.external]
    given = [given_sglang_flags(arguments, group).get("--context-length", "") for group in groups]
    return [int(length) for length in given if length.isdecimal()]


def check_server_groups(arguments: Arguments) -> Iterator[str]:
    """Check groups by themselves and against the other flags."""
    engines = arguments.engines
    if engines.server_groups is not None and engines.rollout_external:
        yield "--rollout-external with --server-groups: write `external = [...]` in the file"
        return
    try:
        groups = server_groups(arguments)
    except ConfigurationError as error:
        yield str(error)
        return
    asked = [each.name for each in readable_sets(arguments.evaluation) if each.engines == "evaluation"]
    if asked and not of_role(groups, "evaluation"):
        yield (
            f"--eval-config {arguments.evaluation.eval_config}: {asked[0]}: engines: evaluation, and no group in "
            '--server-groups has role = "evaluation"'
        )
    if engines.server_groups is None and not engines.rollout_external:
        return  # the one group of flags that other checks look at
    where = f"--server-groups {engines.server_groups}: " if engines.server_groups else ""
    for group in groups:
        yield from (f"{where}{problem}" for problem in _group_problems(group))
    if not of_role(groups, "train"):
        yield f'{where}expected at least one group with role = "train", which generates for training'
    if of_role(groups, "evaluation"):
        if not arguments.evaluation.evaluates:
            yield f"{where}a group for evaluation, and no --eval-prompt-data or --eval-config"
        if arguments.sessions.runs_agent:
            yield f"{where}a group for evaluation: agents always talk to the engines of training; leave it out"
    if arguments.weights.compares_digests and any(group.external for group in groups):
        yield (
            f"external engines with --verify-weights {arguments.weights.verify_weights}: only servers that we start "
            "can say what they hold; use canary"
        )


def _group_problems(group: ServerGroup) -> Iterator[str]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", group.name):
        yield f"group {group.name!r}: expected a name of small letters, digits and _, such as train or big_gpus"
    if group.engines < 1 or group.gpus_per_engine < 1:
        yield f"group {group.name}: expected at least one engine, of at least one GPU"
    if group.nodes_per_engine < 1 or group.gpus_per_engine % group.nodes_per_engine:
        yield (
            f"group {group.name}: gpus_per_engine = {group.gpus_per_engine} does not divide by nodes_per_engine = "
            f"{group.nodes_per_engine}"
        )
    if group.role != "frozen" and (group.model is not None or group.port is not None):
        yield f'group {group.name}: model and port are for groups with role = "frozen", not {group.role}'
    for address in group.external:
        if not re.fullmatch(r"[\w.\-]+:\d{1,5}", address):
            yield f"group {group.name}: expected external engines as host:port, found {address!r}"
    if group.external and (group.sglang or group.model is not None):
        yield f"group {group.name}: external engines are up already, so sglang and model would have no effect"
