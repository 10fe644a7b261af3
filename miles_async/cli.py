"""The command ``miles-async``. Turns errors into messages and exit codes; torch and Ray load only for a run.

Exit codes: 0 done; 1 the run failed; 2 flags or data cannot work, nothing was started; 130 interrupted.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from arguments import Arguments
from arguments.config_file import to_toml
from arguments.evaluation import parse_data_sets
from arguments.parser import parse_arguments
from arguments.validation import validate
from miles_async import __version__
from miles_async.errors import ConfigurationError, DataError, MilesAsyncError

HELP = f"""\
Usage: miles-async COMMAND ...

Fully asynchronous RL post-training: Megatron-core trains, SGLang generates, neither waits for the other.

Commands:
  train          train a model; `miles-async train --help` lists its flags
  ledger         where the attempts of a run ended; quarantined prompts; `miles-async ledger --help`
  explain        what happened to one prompt or attempt of a run; `miles-async explain --help`
  stop           end a run, and whatever is left of it; `miles-async stop --help`
  replay         take the decisions of a run with --record again, and compare; `miles-async replay --help`
  plan           predict step time, idle time and ages of settings; `miles-async plan --help`
  --version      print the version ({__version__})

Examples:
  miles-async train @examples/quickstart/reverse.args              the quick start (CPU, minutes)
  miles-async train @examples/quickstart/reverse.args --dry-run    check everything, start nothing
  miles-async train @examples/quickstart/reverse.args --max-weight-staleness 0 --max-rollout-lead 1
  miles-async ledger runs/quickstart                               the balance, also while the run goes on
  miles-async explain runs/quickstart 17                           attempt 17, from issue to end
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process exit code. ``--help`` raises SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except (ConfigurationError, DataError) as error:
        return _report(error, 2)
    except MilesAsyncError as error:
        return _report(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        _show(HELP)
        return 0 if words else 2
    if command == "--version":
        print(f"miles-async {__version__}")
        return 0
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"commands: {', '.join(COMMANDS)}"
        raise ConfigurationError(f"unknown command {command}; {hint}")
    return COMMANDS[command](words[1:])


def _train(words: Sequence[str]) -> int:
    parsed = parse_arguments(words, prog="miles-async train")
    if parsed.print_config:
        _show(to_toml(parsed.arguments))
        return 0
    validate(parsed.arguments)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where hooks are looked up, here and in the workers
    check_hooks(parsed.arguments)
    prompts = check_prompts(parsed.arguments)
    if parsed.dry_run:
        _show(summarize(parsed.arguments, prompts) + "\n")
        return 0
    from miles_async.train import run  # here, since it brings torch and Ray with it

    return run(parsed.arguments)


def _ledger(words: Sequence[str]) -> int:
    from miles_async.ledger_commands import ledger

    _show(ledger(words))
    return 0


def _explain(words: Sequence[str]) -> int:
    from miles_async.ledger_commands import explain

    _show(explain(words))
    return 0


def _stop(words: Sequence[str]) -> int:
    from miles_async.stop_command import stop

    return stop(words)


def _replay(words: Sequence[str]) -> int:
    from miles_async.replay_command import replay

    for line in replay(words):
        _show(line)
    return 0


def _plan(words: Sequence[str]) -> int:
    from miles_async.simulation.plan_command import plan

    _show(plan(words))
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "ledger": _ledger,
    "explain": _explain,
    "stop": _stop,
    "replay": _replay,
    "plan": _plan,
}


def check_prompts(arguments: Arguments) -> dict[str, int]:
    """Check every row; path → number of prompts. Raises DataError naming file and line."""
    from miles_async.prompts.source import open_prompts

    held_out = parse_data_sets(arguments.evaluation.eval_prompt_data or ())
    paths = (arguments.data.prompt_data, *held_out.values())
    return {str(path): len(open_prompts(replace(arguments.data, prompt_data=path))) for path in paths if path}


def check_hooks(arguments: Arguments) -> None:
    """Import what ``module:attr`` flags name and check it against its protocol. Raises ConfigurationError.

    The processes that call the hooks load them again; here a mistake costs no start-up.
    """
    from miles_async import episode_parts
    from miles_async.hooks import load_object
    from miles_async.protocols import Generate
    from miles_async.rollout.filter_hub import resolve_group_filter

    episode_parts.check_hooks(arguments)
    resolve_group_filter(arguments.rewards)
    if arguments.rollout.custom_generate_function_path:
        load_object(arguments.rollout.custom_generate_function_path, Generate, "--custom-generate-function-path")


def summarize(arguments: Arguments, prompts: Mapping[str, int]) -> str:
    """What would run, for people."""
    cluster, model, rollout = arguments.cluster, arguments.model, arguments.rollout
    staleness, steps = (
        arguments.staleness,
        arguments.rollout.samples_per_rollout // arguments.global_batch_size,
    )
    bound = "not bounded" if staleness.bound is None else f"at most {staleness.bound}"
    lines = {
        "model": model.hf_checkpoint,
        "trainer": f"{cluster.trainer_world_size} ranks on {cluster.device}: DP "
        f"{arguments.data_parallel_size}, "
        f"TP {model.tensor_model_parallel_size}, PP {model.pipeline_model_parallel_size}",
        "engines": f"{cluster.num_engines} of {cluster.rollout_num_gpus_per_engine} GPUs (CPU: processes) each",
        **{f"prompts {number}": f"{path} ({count})" for number, (path, count) in enumerate(prompts.items(), start=1)},
        "rollout": f"{rollout.num_rollout} steps of {rollout.rollout_batch_size} prompts × "
        f"{rollout.n_samples_per_prompt} samples, {steps} optimizer step(s) each",
        "staleness": f"age {bound}, {staleness.lead} batch(es) admitted ahead",
        "reward": arguments.rewards.custom_rm_path or arguments.rewards.rm_type,
        "run directory": arguments.observability.run_dir,
    }
    return "Dry run: flags, model directory, prompts and hooks are in order. Nothing was started.\n" + "\n".join(
        f"  {name:<14} {value}" for name, value in lines.items()
    )


def _show(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # `... | head`: the reader has seen enough; Python's own flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, exit_code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return exit_code
