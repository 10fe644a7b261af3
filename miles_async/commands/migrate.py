"""``miles-async migrate``: translate a recipe of slime, miles or verl into flags of ``miles-async train``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.foreign.translate import Translation, mentions, translate
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.pass_through import is_pass_through
from miles_async.arguments.specification import flag_specifications
from miles_async.arguments.unknown_flags import explain_unknown
from miles_async.commands.parser import CommandParser
from miles_async.commands.shell_script import ShellCommand, find_command
from miles_async.commands.verl_overrides import PROGRAMS as VERL_PROGRAMS
from miles_async.commands.verl_overrides import FromVerl, from_verl
from miles_async.errors import ConfigurationError

PROGRAMS = ("train.py", "train_async.py", *VERL_PROGRAMS)

DESCRIPTION = """\
Print the flags of `miles-async train` for a script of slime, miles or verl, one per line; then the flags that are not
needed here and those that could not be mapped, with the reasons. The script is read, not run. The exit code is 1 if a
flag could not be mapped."""

# How old data may be is what the other systems have no flag for: their loop decides it.
SYNCHRONOUS = """\
# train.py generates and trains in turns, which is --on-policy. Asynchronously, with ages of at most two versions, it is
# --max-weight-staleness 2 --use-rollout-logprobs; without --colocate, with GPUs for each side (--rollout-num-gpus).
--on-policy
"""
ONE_STEP_OFF = """\
# train_async.py trains on what the version before generated.
--max-weight-staleness 1
"""
VERL = """\
# verl chooses the reward by data_source, and reads the answer from a column reward_model; here the answer is in the
# column of --label-key, as python -m examples.math.prepare writes it. verl's sides take turns on the same GPUs; here
# each has its own, and what versions of at most two steps ago generated is trained.
--rm-type math
--max-weight-staleness 2
"""
CORRECTION = "--use-rollout-logprobs\n"
CORRECTIONS = {"--use-rollout-logprobs", "--use-tis"}


@dataclass(kw_only=True, slots=True)
class Migrated:
    """The flags of a recipe, sorted by what becomes of them."""

    words: list[tuple[str, ...]]  # for our parser: a flag and its values
    unmapped: list[str]  # with reasons
    not_needed: list[str]  # with reasons
    checked: list[str] = field(default_factory=list)  # flags that config.json answers


def migrate(words: Sequence[str]) -> int:
    """Run ``miles-async migrate``; return the exit code. Raises ConfigurationError naming script and line."""
    parser = CommandParser(prog="miles-async migrate", description=DESCRIPTION)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the script, or - for a command line on stdin")
    script: Path = parser.parse_args(words).script
    command = _command(script)
    verl = from_verl(command.words) if command.program in VERL_PROGRAMS else FromVerl(words=command.words)
    migrated = _sorted_out(translate(verl.words))
    migrated.not_needed += verl.not_needed
    migrated.unmapped += verl.unmapped
    print("".join(_lines(script, command, migrated)), end="")
    return 1 if migrated.unmapped or command.missing else 0


def _command(script: Path) -> ShellCommand:
    try:
        text = sys.stdin.read() if str(script) == "-" else script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{script}: {error}") from None
    if script.suffix == ".py":
        raise ConfigurationError(
            f"{script}: a script in Python decides its flags as it runs: give the command that it prints, "
            "miles-async migrate - < FILE"
        )
    try:
        return find_command(text, PROGRAMS, script.parent)
    except ConfigurationError as error:
        raise ConfigurationError(f"{script}: {error}") from None


def _sorted_out(translation: Translation) -> Migrated:
    flags = flag_specifications().values()
    ours = [flag.flag for flag in flags] + [flag.flag.replace("--", "--no-", 1) for flag in flags if flag.kind is bool]
    known: list[tuple[str, ...]] = []
    unmapped = list(translation.problems.values())
    for flag, values in mentions(translation.words):
        name = flag.partition("=")[0]
        passed = is_pass_through(name, ours) or next(as_megatron_flags([name], ours), name) != name
        if not flag and values:
            unmapped.append(f"{' '.join(values)}: no flag before it")
        elif name in ours or passed:
            known.append((flag, *values))
        elif flag and name not in translation.problems:
            unmapped.append(explain_unknown(name, ours))
    return Migrated(
        words=[words for words in known if words[0] not in translation.problems],
        unmapped=unmapped,
        not_needed=list(translation.notes.values()),
        checked=list(translation.checks),
    )


def _lines(script: Path, command: ShellCommand, migrated: Migrated) -> Iterator[str]:
    yield f"# {script.name if script.name != '-' else 'A command line'} for miles-async train @THIS_FILE\n"
    yield from (f"{shlex.join(words)}\n" for words in migrated.words)
    given = {words[0] for words in migrated.words}
    if command.program == "train.py":
        yield SYNCHRONOUS
    else:
        yield VERL if command.program in VERL_PROGRAMS else ONE_STEP_OFF
        yield "" if given & CORRECTIONS else CORRECTION
    yield from _section("Not needed here", migrated.not_needed)
    if migrated.checked:
        yield from _section("Left out, since config.json of --hf-checkpoint says it", [", ".join(migrated.checked)])
    yield from _section("Could not be mapped", migrated.unmapped)
    yield from _section("Only the shell knows these variables: write their values", command.unknown)
    yield from _section("Assigned more than once, the last one was taken: look at them", command.repeated)
    yield from _section("Sourced by the script and not found, so its flags are missing", command.missing)


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"# {title}:\n"
        yield from (f"#   {line}\n" for line in lines)
