"""``miles-async migrate``: translate a recipe of slime, miles or verl into flags of ``miles-async train``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Literal, get_args

from miles_async.arguments.argument_files import as_typed, split_line
from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.arguments.foreign.checks import check_foreign
from miles_async.arguments.foreign.slime import FULLY_ASYNC_LOOPS
from miles_async.arguments.foreign.translate import Translation, mentions, translate
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.pass_through import is_pass_through
from miles_async.arguments.specification import flag_specifications
from miles_async.arguments.unknown_flags import explain_unknown
from miles_async.arguments.validation import flag_problems
from miles_async.commands.migrate import verl_sft
from miles_async.commands.migrate.defaults import DEFAULTS, missing_defaults
from miles_async.commands.migrate.several_flags import teacher_file, work_out
from miles_async.commands.migrate.shell_script import HOME, ShellCommand, find_command
from miles_async.commands.migrate.verl import PROGRAMS as SAMPLING_PROGRAMS
from miles_async.commands.migrate.verl import Migrated, from_verl
from miles_async.commands.migrate.verl_keys import KEYS
from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import passed_on_problems
from miles_async.runtime.cluster.ray_address import with_ray_address

VERL_PROGRAMS = (*SAMPLING_PROGRAMS, verl_sft.PROGRAM)
PROGRAMS = ("train.py", "train_async.py", *VERL_PROGRAMS)

DESCRIPTION = """\
Print the flags of `miles-async train` for a script of slime, miles or verl, one per line, with those of its defaults
that differ from ours; then the flags that are not needed here, flags that could not be mapped, and what `train` would
refuse, with the reasons. The script is read, not run; files that it names are not looked at. The exit code is 1 if the
result is not whole, or would be refused."""

# How old data may be is what the other systems have no flag for, mostly: their loop decides it.
SYNCHRONOUS = """\
# train.py generates and trains in turns, which is --on-policy. Asynchronously, with ages of at most two versions, it is
# --max-weight-staleness 2 --use-rollout-logprobs; without --colocate, with GPUs for each side (--rollout-num-gpus).
--on-policy
"""
TAKING_TURNS = """\
# An engine that shares the trainer's GPUs and fails ends the run.
--engine-max-restarts 0
"""
ON_SAME_GPUS = """\
# Engines that share the trainer's GPUs get weights there.
--weight-transport ipc
"""
ON_SAME_NODES = """\
# Engines that share the trainer's GPUs on several nodes get weights through Ray.
--weight-transport object_store
"""
ONE_STEP_OFF = """\
# train_async.py trains on what the version before generated.
--max-weight-staleness 1
"""
FULLY_ASYNC = """\
# Its loop generates ahead of the trainer, however old that makes what is trained; here an age is bounded.
--max-weight-staleness 2
"""
VERL = """\
# verl chooses the reward by data_source. Sides that take turns on the same GPUs there have their own here, and what is
# trained is at most two versions old.
--label-key reward_model.ground_truth
--rm-type math
--max-weight-staleness 2
"""
CLUSTER = """\
# Several nodes are a Ray cluster, which the run joins.
--ray-address auto
"""
OTHER_HOOKS = "; hooks have other signatures here: adapt yours (docs/extending/README.md)"
CORRECTION = "--use-rollout-logprobs\n"
CORRECTIONS = {"--use-rollout-logprobs", "--use-tis"}
PROMPTS = {"--prompt-data", "--eval-prompt-data"}  # whose values are paths, too
BOUNDS = {"--max-weight-staleness", "--on-policy"}

System = Literal["slime", "miles", "verl"]
SYSTEMS: tuple[System, ...] = get_args(System)


def migrate(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Run ``miles-async migrate``; return the exit code. Raises ConfigurationError naming script and line."""
    parser = CommandParser(prog="miles-async migrate", description=DESCRIPTION)
    parser.add_argument(
        "script", type=Path, nargs="?", metavar="SCRIPT", help="the script, or - for a command line on stdin"
    )
    parser.add_argument(
        "--table",
        choices=SYSTEMS,
        help="print what becomes of each flag or key of this system, one per line",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the value of a variable that the script takes from the environment, assigns under a condition or leaves "
        "empty, or of its argument: 1=VALUE for $1. May be repeated",
    )
    parsed = parser.parse_args(words)
    script: Path | None = parsed.script
    if (script is None) == (parsed.table is None):
        parser.error("expected SCRIPT or --table")
    if parsed.set and script is None:
        parser.error("--set is for a SCRIPT")
    if script is None:
        show("".join(table(parsed.table)))
        return 0
    command = _command(script, dict(map(_variable, parsed.set)))
    is_verl = command.program in VERL_PROGRAMS
    migrated = _migrated(command, script.parent)
    translation = translate(migrated.words)
    scripted = {} if is_verl else values_by_flag(command.words)
    environment = work_out(translation, scripted)
    _sort_out(translation, migrated)
    migrated.checked += command.described
    flags = list(_flags(command, migrated, scripted))
    command.unknown = [*_unknown(command, migrated)]
    refused = refusals("".join(flags), translation.checks)
    title = f"# {script.name if script.name != '-' else 'A command line'} for miles-async train @THIS_FILE\n"
    file = teacher_file(values_by_flag(migrated.words), scripted)
    remarks = [*_section("Set in the environment", environment)]
    remarks += _section("A file for --server-groups, with the teacher of --use-opd", file)
    remarks += _remarks(command, migrated)
    remarks += _section("`train` would refuse this", refused)
    show("".join([title, *flags, *remarks]))
    return 1 if migrated.unmapped or command.missing or command.unknown or refused else 0


def _migrated(command: ShellCommand, directory: Path) -> Migrated:
    if command.program == verl_sft.PROGRAM:
        return verl_sft.from_sft(command.words, command.launched)
    if command.program in SAMPLING_PROGRAMS:
        return from_verl(command.words, command.program, directory)
    return Migrated(words=command.words)


def _unknown(command: ShellCommand, migrated: Migrated) -> Iterator[str]:
    """Yield the unknown values of the script that may make a difference."""
    expanding = {flag.flag for flag in flag_specifications().values() if flag.kind is Path} | PROMPTS
    literal = [flag for flag, values in mentions(migrated.words) if flag not in expanding and "~" in "".join(values)]
    for name in command.unknown:
        if name == HOME:
            yield from [f"{HOME}, for which {flag} has a ~" for flag in literal]
        elif not _is_left_out(name, command.words):
            yield name


def _is_left_out(unknown: str, words: Sequence[str]) -> bool:
    """True if the variable or substitution is only the value of flags that are left out, whatever it is. verl's keys
    are no flags, so that none is left out.
    """
    pattern = re.compile(rf"\$\{{?{unknown}\b" if unknown.isalnum() or unknown.isidentifier() else re.escape(unknown))
    found = [(flag, values) for flag, values in mentions(words) if any(map(pattern.search, (flag, *values)))]
    rows = [FOREIGN_FLAGS.get(flag) if len(values) == 1 else None for flag, values in found]
    return bool(rows) and all(row is not None and row.takes == "one" and row.verdict != "works" for row in rows)


def values_by_flag(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag → its values, of its last mention; ``--x=1`` is split."""
    found: dict[str, tuple[str, ...]] = {}
    for flag, values in mentions(words):
        name, equals, value = flag.partition("=")
        found[name] = (value, *values) if equals else values
    return found


def refusals(text: str, checks: Mapping[str, Sequence[str]]) -> list[str]:
    """Why ``miles-async train @FILE`` refuses ``text``, on a machine that has all files that it names.

    ``checks``: flags that are left out if they agree with ``text``.
    """
    try:
        arguments = parse_arguments([word for line in text.splitlines() for word in split_line(line)]).arguments
    except ConfigurationError as error:
        lines = str(error).splitlines()
        return [line.removeprefix("  - ") for line in lines[1:] or lines]
    except ValueError as error:  # a value of several lines
        return [str(error)]
    arguments = replace(arguments, cluster=with_ray_address(arguments.cluster))
    given = {flag: tuple(values) for flag, values in checks.items()}
    problems = [*flag_problems(arguments), *check_foreign(arguments, given)]
    try:
        problems += passed_on_problems(arguments)
    except ConfigurationError:  # a file of --server-groups that cannot be read, as flag_problems says
        problems += passed_on_problems(replace(arguments, engines=replace(arguments.engines, server_groups=None)))
    named = (("--eval-config", arguments.evaluation.eval_config), ("--server-groups", arguments.engines.server_groups))
    elsewhere = tuple(f"{flag} {path}: " for flag, path in named if path is not None and not path.exists())
    told = (problem for problem in problems if not problem.startswith(elsewhere))
    return [problem + OTHER_HOOKS if ": expected module:attr" in problem else problem for problem in told]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or re.fullmatch(r"\w+", name) is None:
        raise ConfigurationError(f"--set {text}: expected NAME=VALUE, such as BASE_DIR=/models")
    return name, value


def _command(script: Path, given: Mapping[str, str]) -> ShellCommand:
    try:
        text = sys.stdin.read() if str(script) == "-" else script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{script}: {error}") from None
    if script.suffix == ".py":
        raise ConfigurationError(
            f"{script}: a script in Python decides its flags as it runs: examples/migrate/miles_command.py prints the "
            "command, for miles-async migrate -"
        )
    try:
        return find_command(text, PROGRAMS, script.parent, given)
    except ConfigurationError as error:
        raise ConfigurationError(f"{script}: {error}") from None


def _sort_out(translation: Translation, migrated: Migrated) -> None:
    """Keep the words that our parser knows; put translated flags in front of what ``migrated`` says of the rest."""
    flags = flag_specifications().values()
    ours = [flag.flag for flag in flags] + [flag.negated_flag for flag in flags if flag.kind is bool]
    known, unmapped = list[str](), list(translation.problems.values())
    for flag, values in mentions(translation.words):
        name = flag.partition("=")[0]
        passed = is_pass_through(name, ours) or next(as_megatron_flags([name], ours), name) != name
        if not flag and values:
            unmapped.append(f"{' '.join(values)}: no flag before it")
        elif name in ours or passed:
            known += [flag, *values] if flag not in translation.problems else []
        elif flag and name not in translation.problems:
            unmapped.append(explain_unknown(name, ours))
    migrated.words = known
    migrated.unmapped = unmapped + migrated.unmapped
    migrated.not_needed = [*translation.notes.values(), *migrated.not_needed]
    migrated.checked = list(translation.checks)


def _flags(command: ShellCommand, migrated: Migrated, scripted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Lines of flags, with comments. ``scripted``: the script's own flags, if its defaults are slime's."""
    yield from (f"{shlex.join((flag, *map(as_typed, values)))}\n" for flag, values in mentions(migrated.words) if flag)
    given = values_by_flag(migrated.words)
    supervised = given.get("--loss-type") == ("sft_loss",)
    if command.program not in VERL_PROGRAMS:
        defaults = [f"{shlex.join(words)}\n" for words in missing_defaults({**scripted, **given}, supervised)]
        yield from ["# Defaults of slime and miles that differ from ours.\n", *defaults] if defaults else []
    if given.get("--actor-num-nodes", ("1",)) != ("1",) and "--ray-address" not in given:
        yield CLUSTER
    spread = _nodes_per_engine(scripted, given) if command.program not in VERL_PROGRAMS else 1
    if spread > 1 and not supervised and "--rollout-num-nodes-per-engine" not in given:
        yield f"# So many nodes have the GPUs of an engine.\n--rollout-num-nodes-per-engine {spread}\n"
    if not supervised:
        yield from _loop(command.program, given, fully_async=_is_fully_async(scripted))


def _nodes_per_engine(scripted: Mapping[str, Sequence[str]], given: Mapping[str, Sequence[str]]) -> int:
    """As slime and miles compute it: by the GPUs of a node, 8 if nothing says it."""
    on_node = given.get("--actor-num-gpus-per-node", ("8",)) if "--colocate" in given else ("8",)
    per_node = "".join(scripted.get("--num-gpus-per-node", on_node))
    size = "".join(given.get("--rollout-num-gpus-per-engine", ("1",)))
    known = size.isdigit() and per_node.isdigit() and int(per_node) > 0
    return ceil(int(size) / int(per_node)) if known else 1


def _is_fully_async(scripted: Mapping[str, Sequence[str]]) -> bool:
    loop = scripted.get("--rollout-function-path", ())
    return "--fully-async" in scripted or any(path in FULLY_ASYNC_LOOPS for path in loop)


def _loop(program: str, given: Mapping[str, Sequence[str]], *, fully_async: bool) -> Iterator[str]:
    """Lines about how old data may be, and what corrects for it."""
    if program == "train.py" and not fully_async and not given.keys() & BOUNDS:
        yield SYNCHRONOUS
        if "--colocate" in given:
            yield TAKING_TURNS
            one_node = given.get("--actor-num-nodes", ("1",)) == ("1",)
            yield "" if "--weight-transport" in given else ON_SAME_GPUS if one_node else ON_SAME_NODES
        return
    if program in VERL_PROGRAMS:
        yield VERL
    elif not given.keys() & BOUNDS:
        yield FULLY_ASYNC if fully_async else ONE_STEP_OFF
    yield "" if given.keys() & CORRECTIONS else CORRECTION


def _remarks(command: ShellCommand, migrated: Migrated) -> Iterator[str]:
    yield from _section("Not needed here", migrated.not_needed)
    if migrated.checked:
        title = "Left out, since config.json of --hf-checkpoint or another flag says it"
        yield from _section(title, [", ".join(migrated.checked)])
    yield from _section("Could not be mapped", migrated.unmapped)
    title = "Only the shell knows these: write their values, or give variables by --set NAME=VALUE"
    yield from _section(title, command.unknown)
    title = "A date of the script is that of now in these: look at them before a second run"
    yield from _section(title, command.dated)
    yield from _section("Assigned more than once, the last one was taken: look at them", command.repeated)
    title = "Set or extended under a condition or in a loop, taken once as if it held: look at them"
    yield from _section(title, command.conditional)
    title = "A backslash is missing before these in the script, which were taken as a part of the command: look at them"
    yield from _section(title, command.joined)
    yield from _section("Sourced by the script and not found, so its flags are missing", command.missing)


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"# {title}:\n"
        yield from (f"#   {' '.join(line.splitlines())}\n" for line in lines)


def table(system: System) -> Iterator[str]:
    """Yield each flag, value, default and key of another system (``--table``).

    slime and miles share a table, with the flags of Megatron-LM, SGLang and smg that they take.
    """
    if system == "verl":
        for title, keys in (("", KEYS), (f"# {verl_sft.PROGRAM}\n", verl_sft.KEYS)):
            yield title
            for key in sorted(keys, key=lambda key: key.key):
                yield _line(key.key, key.only, key.verdict, key.note)
        return
    rows = sorted(FOREIGN_FLAGS.values(), key=lambda row: (row.origin, row.flag))
    for origin, of_origin in groupby(rows, key=lambda row: row.origin):
        yield f"# {origin}\n"
        for row in of_origin:
            yield _line(row.flag, row.only, row.verdict, row.note)
            yield from (_line(row.flag, (value,), "noted", why) for value, why in row.idle.items())
    yield "# Values\n"
    for value in FOREIGN_VALUES.values():
        verdict = f"works, as {' '.join(value.ours)}" if value.ours else "refused"
        yield _line(f"{value.flag} {value.value}", (), verdict, value.note)
    yield "# Defaults that differ from ours and decide what is trained, as our flags\n"
    for default in DEFAULTS:
        shown = f"{default.flag} {default.value if isinstance(default.value, str) else ''}".rstrip()
        conditions = [f"unless {' or '.join(default.unless)}" if default.unless else "",
                      f"with {' or '.join(default.needs)}" if default.needs else ""]  # fmt: skip
        note = ", ".join(filter(None, [default.about, *conditions]))
        yield f"{shown}  {note}".rstrip() + "\n"


def _line(name: str, only: Iterable[str], verdict: str, note: str) -> str:
    values = " or ".join(only)
    return f"{name}{f' {values}' if values else ''}  {verdict}: {note.replace('`', '')}\n"
