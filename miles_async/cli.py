"""The command ``miles-async``. Turns errors into messages and exit codes; torch and Ray load only for a run.

Exit codes: 0 done; 1 the run failed; 2 flags or data cannot work, nothing was started; 130 interrupted.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
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

Command = Callable[[Sequence[str]], int]
"""Runs a command with the words after its name; returns the exit code."""

HELP = f"""\
Usage: miles-async COMMAND ...

Fully asynchronous RL post-training: Megatron-core trains, SGLang generates, neither waits for the other.

Commands:
  train          train a model; `miles-async train --help` has the most needed flags
  rollout        sample a model's answers to prompts and estimate pass@k; `miles-async rollout --help`
  eval           evaluate a model on held-out prompts, or compare two; `miles-async eval --help`
  watch          show runs in a browser, live: curves, samples, engines; `miles-async watch --help`
  report         write that page with a run's data into one file; `miles-async report --help`
  status         show where a run stands: step, ages, what it waits for; `miles-async status --help`
  compare        show which flags of runs differ, and their curves; `miles-async compare --help`
  timeline       write a timeline of a run, for Perfetto; `miles-async timeline --help`
  ledger         show how attempts ended, and quarantined prompts; `miles-async ledger --help`
  explain        show what happened to one prompt or attempt of a run; `miles-async explain --help`
  samples        show text and tokens of samples, by step, reward or words; `miles-async samples --help`
  stop           end a run and clean up what is left of it; `miles-async stop --help`
  scale          add or remove engines of a running run; `miles-async scale --help`
  set            change settings of a live run; `miles-async set --help`
  replay         repeat the decisions of a run with --record and compare; `miles-async replay --help`
  plan           predict step time, idle time and ages of settings; `miles-async plan --help`
  migrate        translate a slime, miles or verl recipe into flags; `miles-async migrate --help`
  doctor         check this machine, or a cluster, and say how to fix it; `miles-async doctor --help`
  completion     complete commands and flags in a shell; `miles-async completion --help`
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


def _command(module: str, name: str, *, shows: bool = False) -> Command:
    """A command that returns its output, whole or in parts. Imported when it is called.

    ``shows``: it gets :func:`_show` for output while it works, and returns its exit code.
    """

    def run(words: Sequence[str]) -> int:
        command = getattr(import_module(f"miles_async.commands.{module}"), name)
        if shows:
            return command(words, _show)
        try:
            for part in [found] if isinstance(found := command(words), str) else found:
                _show(part)
        except PermissionError as error:  # of another user's run, say
            raise ConfigurationError(str(error)) from error
        return 0

    return run


def _completion(words: Sequence[str]) -> int:
    from miles_async.commands.completion import completion

    _show(completion(words, COMMANDS))
    return 0


COMMANDS: Mapping[str, Command] = {
    "train": _command("train", "train", shows=True),
    "rollout": _command("rollout", "rollout", shows=True),
    "eval": _command("rollout", "evaluate", shows=True),
    "watch": _command("watch", "watch", shows=True),
    "report": _command("report", "report"),
    "status": _command("status", "status"),
    "compare": _command("compare", "compare"),
    "timeline": _command("timeline", "timeline"),
    "ledger": _command("ledger", "ledger"),
    "explain": _command("ledger", "explain"),
    "samples": _command("samples", "samples"),
    "stop": _command("stop", "stop", shows=True),
    "scale": _command("scale", "scale"),
    "set": _command("live_set", "set_live"),
    "replay": _command("replay", "replay"),
    "plan": _command("plan", "plan"),
    "migrate": _command("migrate.command", "migrate", shows=True),
    "doctor": _command("doctor", "doctor", shows=True),
    "completion": _completion,
}


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
