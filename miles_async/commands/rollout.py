"""``miles-async rollout`` and ``miles-async eval``: generate and reward without training, and estimate pass@k.

Both are runs with ``--eval-only``: no trainer starts. Their output is computed from the run's samples, even if it was
interrupted.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from miles_async.arguments import Arguments
from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.config_file import read_config_file, to_toml
from miles_async.arguments.debug import DebugArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.evaluation_alone import evaluation_alone, rollout_as_evaluation
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.arguments.parser import ParsedCommandLine, parse_arguments
from miles_async.arguments.rewards import RewardArguments
from miles_async.arguments.sessions import SessionsArguments
from miles_async.checkpoints.files import find_checkpoint
from miles_async.commands.evaluation_report import REPORT_FILE, Evaluated, evaluated, report
from miles_async.commands.parser import CommandParser
from miles_async.commands.train import train_config
from miles_async.errors import ConfigurationError, MilesAsyncError
from miles_async.runs.config import Config
from miles_async.runs.launch import Show
from miles_async.runs.starting import train_command
from miles_async.runtime.files.run_directory import CONFIG_FILE
from miles_async.runtime.processes.last_resort import signals_interrupt
from miles_async.samples.reader import samples_files
from miles_async.wiring.generated_prompts import with_generated_prompts

HELP = """\
Usage: miles-async {name} --hf-checkpoint MODEL {prompts} --rm-type NAME [--against RUN_DIR] [--FLAG VALUE ...]

{description}
No trainer starts: engines serve MODEL, a Hugging Face directory, such as one of --save-hf.
Flags are those of `miles-async train`; flags of training have no effect.{load}

Written into --run-dir: samples/eval-00000000.parquet (`miles-async samples RUN_DIR` shows it) and evaluation.json.
Ctrl-C ends it with the samples that are there.

  --against RUN_DIR   compare, prompt by prompt, with the last evaluation of another run: of this command or of training
  --dry-run           check everything, start nothing

Examples:
{examples}
"""

ROLLOUT_HELP = HELP.format(
    name="rollout",
    load="",
    prompts="--prompt-data FILE",
    description="Sample --prompt-data as training would (--n-samples-per-prompt, --rollout-temperature) and estimate\n"
    "reward and pass@k.",
    examples="  miles-async rollout --hf-checkpoint models/Qwen3-4B --prompt-data math.jsonl --rm-type math \\\n"
    "    --n-samples-per-prompt 16 --run-dir runs/before\n"
    "  miles-async rollout --hf-checkpoint models/Qwen3-4B --prompt-data 'math.jsonl@[0:200]' \\\n"
    "    --environment-path my_env:MyEnv --run-dir runs/tools --against runs/before",
)
EVAL_HELP = HELP.format(
    name="eval",
    load=" With --load CHECKPOINT a run's\ncheckpoint is exported first (trainer ranks load it, write RUN_DIR.hf and "
    "end), then evaluated.",
    prompts="--eval-prompt-data [NAME] FILE ...",
    description="Evaluate as training would (--eval-prompt-data, --eval-config, --eval-temperature, ...): "
    "reward and pass@k\nof each data set.",
    examples="  miles-async eval @my_run.args --hf-checkpoint runs/my-run/hf --run-dir runs/my-eval\n"
    "  miles-async eval @my_run.args --hf-checkpoint models/other --run-dir runs/other --against runs/my-eval",
)


def rollout(words: Sequence[str], show: Show) -> int:
    """Run ``miles-async rollout``; return the exit code. Raises what ``miles-async train`` does."""
    return _run("rollout", ROLLOUT_HELP, words, show)


def evaluate(words: Sequence[str], show: Show) -> int:
    """Run ``miles-async eval``; return the exit code. Raises what ``miles-async train`` does."""
    return _run("eval", EVAL_HELP, words, show)


def _run(name: str, text: str, words: Sequence[str], show: Show) -> int:
    if {"-h", "--help"}.intersection(words):
        show(text)
        return 0
    own = CommandParser(f"miles-async {name}", "", add_help=False)
    own.add_argument("--against", type=Path)
    ours, rest = own.parse_known_args(words)
    before = None if ours.against is None else evaluated(ours.against)  # a wrong name is noticed before the run
    parsed = parse_arguments(rest, prog=f"miles-async {name}")
    held_out = parsed.arguments.evaluation
    if name == "rollout" and held_out.evaluates:
        show("note: `miles-async rollout` samples --prompt-data; --eval-prompt-data and --eval-config have no effect\n")
    if name == "rollout" or held_out.eval_prompt_data is None:
        parsed = replace(parsed, arguments=with_generated_prompts(parsed.arguments))
    arguments = rollout_as_evaluation(parsed.arguments) if name == "rollout" else parsed.arguments
    load = arguments.checkpoint.load
    arguments = evaluation_alone(arguments)
    if before is not None:
        _require_shared(before, [each.name for each in evaluation_sets(arguments.evaluation)])
    run_dir = arguments.observability.run_dir
    _keep_training(run_dir)
    with signals_interrupt():
        if load is not None:
            exported = _export(load, run_dir, parsed, show)
            arguments = replace(arguments, model=replace(arguments.model, hf_checkpoint=exported))
        status = train_config(Config(tuple(rest), replace(parsed, arguments=arguments)), show)
    if parsed.dry_run or parsed.print_config:
        return status
    if status and not samples_files(run_dir):
        return status  # interrupted before a sample ended
    described, record = report(evaluated(run_dir), before)
    (run_dir / REPORT_FILE).write_text(json.dumps(record, indent=2) + "\n")
    show(described)
    return status


def _export(load: Path, run_dir: Path, parsed: ParsedCommandLine, show: Show) -> Path | None:
    """Write the weights of ``load`` as Hugging Face files next to ``run_dir``, in a process that trains nothing.

    Returns where they are; for a dry run, which exports nothing, ``--hf-checkpoint``. Raises MilesAsyncError.
    """
    checkpoint = find_checkpoint(load)
    if parsed.dry_run or parsed.print_config:
        return parsed.arguments.model.hf_checkpoint
    directory, export_dir = (run_dir.with_name(f"{run_dir.name}.{ending}") for ending in ("hf", "export"))
    show(f"exporting {checkpoint.directory} to {directory}\n")
    arguments = _exporting(parsed.arguments, checkpoint.directory, directory, export_dir)
    with TemporaryDirectory(prefix="miles-async-export-") as temporary:
        config = Path(temporary) / CONFIG_FILE
        config.write_text(to_toml(arguments))
        status = _finished(train_command(["--config", str(config)]))
    if status:
        raise MilesAsyncError(f"the export of {checkpoint.directory} failed with status {status}; see {export_dir}")
    return directory


def _exporting(arguments: Arguments, load: Path, save_hf: Path, run_dir: Path) -> Arguments:
    """Arguments of a run that only exports a checkpoint: no checkpoints, no restarts, no evaluation, no trackers."""
    observability, anyway = arguments.observability, arguments.checkpoint.load_anyway
    alone = replace(
        arguments,
        checkpoint=CheckpointArguments(load=load, load_anyway=anyway, save_hf=save_hf),
        debug=DebugArguments(debug_train_only=True),
        evaluation=EvaluationArguments(),
        observability=ObservabilityArguments(
            run_dir=run_dir, log_level=observability.log_level, stall_timeout=observability.stall_timeout
        ),
    )
    if arguments.algorithm.supervised:  # flags for the evaluation's samples, which supervised training refuses
        return replace(alone, rewards=RewardArguments(), sessions=SessionsArguments())
    return alone


def _finished(command: Sequence[str]) -> int:
    """Run a command; return its exit status. An interrupt ends it first."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _require_shared(before: Evaluated, names: Sequence[str]) -> None:
    if not before.data_sets.keys() & {*names}:
        raise ConfigurationError(
            f"--against {before.run_dir} has the data sets {', '.join(before.data_sets)}, and this evaluation "
            f"{', '.join(names)}: expected one that both have; a name before a file of --eval-prompt-data names it"
        )


def _keep_training(run_dir: Path) -> None:
    """Raise ConfigurationError if ``run_dir`` has a training run, which an evaluation would move aside."""
    if not (run_dir / CONFIG_FILE).is_file():
        return
    try:
        alone = read_config_file(run_dir / CONFIG_FILE)[0].get("eval_only")
    except ConfigurationError:  # of another version
        alone = False
    if not alone:
        raise ConfigurationError(
            f"--run-dir {run_dir} has a training run: give the evaluation a separate directory, such as "
            f"--run-dir {run_dir.with_name(run_dir.name + '-eval')}"
        )
