"""Settings of a live run: requests of ``miles-async set`` are checked when they come and wait for a step's boundary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.live import (
    IN_FORCE,
    as_typed,
    check_change,
    check_requests,
    in_force,
    parse_changes,
    value_of,
    with_flags,
)
from miles_async.arguments.problems import refuse
from miles_async.arguments.specification import flag_specifications
from miles_async.errors import ConfigurationError
from miles_async.types import Changes, KeptSetting, SettingValue

GENERATION = "generation"
TRAINERS = ("lr", "entropy_coef", "kl_loss_coef", "kl_coef")
"""Settings that the training backend applies."""


class LiveSettings:
    """Implements ``controller.LiveSettings``."""

    def __init__(
        self,
        arguments: Arguments,
        inherited: Mapping[str, KeptSetting],
        apply: Callable[[Changes], Awaitable[None]],
        *,
        trainer_changes: bool = True,
    ) -> None:
        """``arguments``: with ``inherited``, the settings of the checkpoint that the run resumes from. ``apply``:
        ``RolloutSide.change``. ``trainer_changes``: whether the backend's settings may change.
        """
        self._started = self._now = self._asked = arguments
        self._flags = {name: value_of(arguments, name) for name in IN_FORCE}  # as given, without inherited settings
        self._flags |= {name: kept.flag for name, kept in inherited.items() if kept.value == self._flags.get(name)}
        self._apply = apply
        self._trainer_changes = trainer_changes
        self._requests: dict[str, str] = {}
        self._generation = "running"
        self._passed: int | None = None  # the step of the last boundary
        self._over = False

    # ------------------------------------------------------------------------------------------- of the loop
    def begin(self, step: int) -> None:
        """Note that the loop continues after ``step`` trained steps."""
        self._passed = step

    def take(self, step: int, *, last: bool) -> Changes | None:
        """Take the changes requested since the last call; they take effect after ``step``."""
        before, after, requests = in_force(self._now), in_force(self._asked), self._requests
        self._passed, self._now, self._requests = step, self._asked, {}
        self._over = last or "stop" in requests
        changed = {name: value for name, value in after.items() if value != before[name]}
        if not changed and not requests:
            return None
        return Changes(after=step, before={name: before[name] for name in changed}, values={**changed, **requests})

    def kept(self) -> dict[str, KeptSetting]:
        """Changed flags, for a checkpoint."""
        now = {name: value_of(self._now, name) for name in IN_FORCE}
        return {
            name: KeptSetting(flag=flag, value=now[name]) for name, flag in self._flags.items() if now[name] != flag
        }

    # -------------------------------------------------------------------------------------------- of commands
    async def set(self, changes: Mapping[str, str]) -> str:
        """Check changes, name → value as typed, all or none; return what will happen.

        Raises ConfigurationError listing all problems.
        """
        flags, requests = parse_changes(changes)
        if self._passed is None or self._over:
            when = "is in its last step" if self._over else "has not begun its first step"
            raise ConfigurationError(f"the run {when}: nothing can change now")
        wanted = with_flags(self._asked, flags)
        before, after = in_force(self._asked), in_force(wanted)
        check_change(self._started, self._asked, wanted)
        check_requests(wanted, requests)
        refuse(self._without_effect(flags, before, after))
        generation, step = requests.pop(GENERATION, None), self._passed + 1
        self._asked = wanted
        self._requests |= requests
        said = [_line(name, before[name], after[name]) for name in IN_FORCE if before[name] != after[name]]
        said = [f"{line}, after step {step}" for line in (*said, *map(" ".join, requests.items()))]
        if generation is not None:
            await self._generate(generation)
            said.append(f"{GENERATION} {generation}, from now on")
        return "\n".join(said)

    async def settings(self) -> str:
        """All settings with their values, one per line, and pending changes."""
        now, asked = in_force(self._now), in_force(self._asked)
        lines = [
            f"{as_typed(name)} {_shown(now[name])}" if now[name] == asked[name] else _line(name, now[name], asked[name])
            for name in IN_FORCE
        ]
        return "\n".join(
            [*lines, f"{GENERATION} {self._generation}", *(" ".join(each) for each in self._requests.items())]
        )

    async def _generate(self, word: str) -> None:
        """Pause or resume generation at once: a run that gets no batch reaches no boundary."""
        assert self._passed is not None
        values = {GENERATION: word}
        await self._apply(Changes(after=self._passed, before={GENERATION: self._generation}, values=values))
        self._generation = word

    def _without_effect(
        self, flags: Mapping[str, FlagValue], before: Mapping[str, SettingValue], after: Mapping[str, SettingValue]
    ) -> list[str]:
        problems = [
            f"{as_typed(name)} is {_shown(before[name])} already"
            + (", by --on-policy" if self._started.staleness.on_policy and name in ON_POLICY else "")
            for name in flags
            if before[name] == after[name]
        ]
        if not self._trainer_changes:
            problems += [
                f"{as_typed(name)}: the training backend (--train-backend) has no change()"
                for name in flags
                if name in TRAINERS
            ]
        return problems


ON_POLICY = tuple(name for name, flag in flag_specifications().items() if "on_policy" in flag.replaced_by)


def _line(name: str, before: SettingValue, after: SettingValue) -> str:
    return f"{as_typed(name)} {_shown(before)} → {_shown(after)}"


def _shown(value: SettingValue) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
