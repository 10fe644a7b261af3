"""Defaults of slime and miles that differ from ours and decide what is trained; ``miles-async migrate`` writes them.

Other differences are left alone (``--sequence-parallel``, ``--async-save``, ``--max-tokens-per-gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from miles_async.arguments.algorithm_checks import LOSSES_WITH

Given = Mapping[str, Sequence[str]]
"""Flag → its values, of a command line."""


@dataclass(frozen=True, slots=True)
class ForeignDefault:
    """One default, as our words for it."""

    flag: str
    value: str | Callable[[Given], str]
    _: KW_ONLY
    unless: tuple[str, ...] = ()  # flags that decide it besides ``flag`` and its opposite
    needs: tuple[str, ...] = ()  # flags without any of which it has no effect, and would be refused
    losses: Container[str] = ()  # losses that read it; with others of ours it would be refused
    runs: Literal["all", "sampled"] = "all"  # sampled: refused with --loss-type sft_loss
    about: str = ""  # the value, where other flags decide it


def _temperature(given: Given) -> str:
    return " ".join(given.get("--rollout-temperature", ("1.0",)))


def _shared_gpus(given: Given) -> str:
    (nodes,), (gpus,) = given.get("--actor-num-nodes", ("1",)), given.get("--actor-num-gpus-per-node", ("8",))
    return str(int(nodes) * int(gpus)) if nodes.isdigit() and gpus.isdigit() else f"{nodes}*{gpus}"


DEFAULTS: tuple[ForeignDefault, ...] = (
    ForeignDefault("--input-key", "input"),
    ForeignDefault("--label-key", "none"),
    ForeignDefault("--metadata-key", "metadata"),
    ForeignDefault("--tool-key", "tools", needs=("--apply-chat-template",)),
    ForeignDefault("--no-apply-chat-template", ""),
    ForeignDefault("--no-rollout-shuffle", ""),
    ForeignDefault("--n-samples-per-prompt", "1"),
    ForeignDefault("--actor-num-gpus-per-node", "8"),
    ForeignDefault("--rollout-num-gpus", _shared_gpus, needs=("--colocate",), about="those that train"),
    ForeignDefault("--loss-aggregation", "sequence_mean", unless=("--calculate-per-token-loss",)),
    ForeignDefault("--eps-clip-c", "none", losses=LOSSES_WITH["eps_clip_c"], runs="sampled"),
    ForeignDefault("--kl-loss-type", "k1", needs=("--use-kl-loss",), runs="sampled"),
    ForeignDefault(
        "--eval-temperature",
        _temperature,
        needs=("--eval-prompt-data", "--eval-config"),
        runs="sampled",
        about="that of training",
    ),
    ForeignDefault("--lr-decay-style", "linear"),
    ForeignDefault("--weight-decay", "0.01"),
    ForeignDefault("--adam-beta2", "0.999"),
)
"""As of August 2026. The optimizer's are Megatron-LM's."""


def missing_defaults(given: Given, supervised: bool) -> Iterator[tuple[str, ...]]:
    """Yield our words for each default that the flags of ``given`` leave unset."""
    if supervised:
        given = {"--apply-chat-template": (), **given}  # what is learned are messages, rendered in any case
    loss = " ".join(given.get("--policy-loss", ("ppo_clip",)))
    for default in DEFAULTS:
        opposite = default.flag.replace("--no-", "--", 1)
        decided = any(flag in given for flag in (default.flag, opposite, *default.unless))
        idle = default.needs and not any(flag in given for flag in default.needs)
        unread = default.losses and ":" not in loss and loss not in default.losses
        if decided or idle or unread or (supervised and default.runs == "sampled"):
            continue
        value = default.value if isinstance(default.value, str) else default.value(given)
        yield (default.flag, value) if value else (default.flag,)
