"""The command ``miles-async``. Turns errors into messages and exit codes; torch and Ray load only for a run.

Exit codes: 0 done; 1 the run failed; 2 flags or data cannot work, nothing was started; 130 interrupted.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from miles_async import __version__
from miles_async.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    ContractViolation,
    DataError,
    MilesAsyncError,
)
from miles_async.runtime.texts import escaped


@dataclass(frozen=True, slots=True)
class Command:
    """A function of ``miles_async/commands/``, imported when it is called with the words after the command's name.

    It returns its output, whole or in parts.
    """

    module: str
    function: str
    purpose: str  # for --help
    shows: bool = False  # it gets :func:`_show` for output while it works, and returns its exit code
    completes: bool = False  # it gets the names of all commands

    def __call__(self, words: Sequence[str]) -> int:
        """Run the command; the exit code."""
        function = getattr(import_module(f"miles_async.commands.{self.module}"), self.function)
        if self.shows:
            return function(words, _show)
        try:
            output = function(words, COMMANDS) if self.completes else function(words)
            for part in [output] if isinstance(output, str) else output:
                _show(part)
        except PermissionError as error:  # of another user's run, say
            raise ConfigurationError(str(error)) from error
        return 0


COMMANDS: Mapping[str, Command] = {
    "train": Command("train", "train", "train a model", shows=True),
    "rollout": Command("rollout", "rollout", "sample a model's answers to prompts and estimate pass@k", shows=True),
    "eval": Command("rollout", "evaluate", "evaluate a model on held-out prompts, or compare two", shows=True),
    "watch": Command("watch", "watch", "show runs in a browser, live: curves, samples, engines", shows=True),
    "report": Command("report", "report", "write that page with a run's data into one file"),
    "status": Command("status", "status", "show where a run stands: step, ages, what it waits for"),
    "compare": Command("compare", "compare", "show which flags of runs differ, and their curves"),
    "timeline": Command("timeline", "timeline", "write a timeline of a run, for Perfetto"),
    "ledger": Command("ledger", "ledger", "show how attempts ended, and quarantined prompts"),
    "explain": Command("ledger", "explain", "show what happened to one prompt or attempt of a run"),
    "samples": Command("samples", "samples", "show text and tokens of samples, by step, reward or words"),
    "stop": Command("stop", "stop", "end a run and clean up what is left of it", shows=True),
    "scale": Command("scale", "scale", "add or remove engines of a running run"),
    "set": Command("live_set", "set_live", "change settings of a live run"),
    "replay": Command("replay", "replay", "repeat the decisions of a run with --record and compare"),
    "plan": Command("plan", "plan", "predict step time, idle time and ages of settings"),
    "migrate": Command("migrate.command", "migrate", "translate a slime, miles or verl recipe into flags", shows=True),
    "doctor": Command("doctor", "doctor", "check this machine, or a cluster, and say how to fix it", shows=True),
    "completion": Command("completion", "completion", "complete commands and flags in a shell", completes=True),
}


def _row(name: str, purpose: str) -> str:
    more = " has the most needed flags" if name == "train" else ""
    return f"  {name:<15}{purpose}; `miles-async {name} --help`{more}\n"


HELP = f"""\
Usage: miles-async COMMAND ...

Fully asynchronous RL post-training: Megatron-core trains, SGLang generates, neither waits for the other.

Commands:
{"".join(_row(name, command.purpose) for name, command in COMMANDS.items())}\
  --version      print the version ({__version__})

Examples:
  miles-async train @examples/quickstart/reverse.args              the quick start (CPU, minutes)
  miles-async train @examples/quickstart/reverse.args --dry-run    check everything, start nothing
  miles-async train @examples/quickstart/reverse.args --max-weight-staleness 0 --max-rollout-lead 1
  miles-async ledger runs/quickstart                               the balance, also during the run
  miles-async explain runs/quickstart 17                           attempt 17, from issue to end
  miles-async samples runs/quickstart --step 10 --sort reward      what the model wrote, best first
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process exit code. ``--help`` raises SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    _replace_unprintable()
    try:
        return _dispatch(words)
    except (ConfigurationError, DataError) as error:
        return _report(error, EXIT_CONFIGURATION)
    except MilesAsyncError as error:
        return _report(error, EXIT_FAILED)
    except ImportError as error:  # torch without one of CUDA's libraries, say
        traceback.print_exc()
        problem = f"a package does not load: {error}; `miles-async doctor` says how to mend it"
        return _report(MilesAsyncError(problem), EXIT_FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _replace_unprintable() -> None:
    """Print "?" for characters that the encoding of the terminal or pipe lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        _show(HELP)
        return 0 if words else EXIT_CONFIGURATION
    if command == "--version":
        print(f"miles-async {__version__}")
        return 0
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"commands: {', '.join(COMMANDS)}"
        raise ConfigurationError(f"unknown command {command}; {hint}")
    return COMMANDS[command](words[1:])


def _show(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # `... | head`: the reader has seen enough; Python's own flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, exit_code: int) -> int:
    bug = "\nThis is a bug of miles_async: please report it with logs/ of the run directory."
    told = escaped(str(error), keep="\n\t") + (bug if isinstance(error, ContractViolation) else "")
    print(f"error: {told}", file=sys.stderr)
    return exit_code
