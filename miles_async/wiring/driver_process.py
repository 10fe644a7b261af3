"""The driver's process: Arguments in, a finished run out.

However the run ends (done, an error on either side, Ctrl-C, SIGTERM), both sides are stopped, then Ray, and the summary
covers the run so far.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog
from msgspec import to_builtins

from miles_async.arguments import Arguments, DataArguments, EvaluationArguments, SessionsArguments
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.evaluation import parse_data_sets
from miles_async.arguments.prompt_files import absolute, absolute_words
from miles_async.checkpoints.save_lock import save_lock
from miles_async.errors import EXIT_INTERRUPTED, ConfigurationError, ProcessLostError, StalledError, first_error
from miles_async.observability.logs import configure_logging
from miles_async.observability.summary import Ending
from miles_async.observability.wandb_tracker import with_shared_id
from miles_async.runtime.files.owned_directory import OwnedDirectory, sweep_temporary, temporary_parent
from miles_async.runtime.files.run_directory import CONFIG_FILE, Claim, claimed
from miles_async.runtime.processes.fork_server_process import ForkServers
from miles_async.runtime.processes.last_resort import LastResort
from miles_async.runtime.processes.restarts import own_restarts, write_restarts
from miles_async.runtime.tasks import first_of
from miles_async.wiring.driver import Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")

log = structlog.get_logger(__name__)


def run(arguments: Arguments, imports: ForkServers) -> int:
    """Run to the end. Returns the exit code: 0 done, 130 interrupted. Raises the first error of either side.

    ``imports``: what processes of this run are forked from (``early_imports.py``).
    """
    arguments = with_absolute_paths(arguments)
    run_dir = arguments.observability.run_dir
    sweep_temporary(arguments.weights.weight_staging_dir)  # of runs that were killed
    try:
        temporary = OwnedDirectory(temporary_parent(), mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"the run has no place for temporary files (TMPDIR): {error}") from error
    try:
        with (
            save_lock(arguments.checkpoint.save, run_dir) as lock,
            claimed(run_dir, temporary.path / "control") as claim,
        ):
            configure_logging(run_dir, arguments.observability.log_level)
            if lock is not None and lock.taken_from is not None:
                log.warning("--save was locked by a run that is over", owner=str(lock.taken_from))
            _write_beginning(arguments, run_dir)
            arguments = replace(arguments, observability=with_shared_id(arguments.observability))
            return _to_the_end(Run(arguments, imports, run_dir, temporary.path, lock), claim)
    finally:
        temporary.remove()
        sweep_temporary(arguments.weights.weight_staging_dir)  # of engines and ranks that were killed


def _to_the_end(training: Run, claim: Claim) -> int:
    with LastResort(training.end_at_once, training.lost) as last_resort:

        async def main() -> None:
            last_resort.interrupts_this_task()
            await first_of(training.main(last_resort.all_is_up), claim.until_lost())

        try:
            asyncio.run(main())
        except BaseException as error:
            # Ray's processes got the same signal: their failures are not the run's.
            if last_resort.interrupted or isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                if isinstance(error, Exception):
                    log.warning("something failed while the run was being ended", error=repr(first_error(error)))
                training.report.try_to_write("interrupted")
                return EXIT_INTERRUPTED
            cause = first_error(error)
            training.report.try_to_write("lost" if training.lost() else _ending_with(cause), str(cause))
            raise cause from error
        training.report.write("finished")
        return 0


def _ending_with(error: BaseException) -> Ending:
    if isinstance(error, ProcessLostError):
        return "lost"
    return "stalled" if isinstance(error, StalledError) else "failed"


def _write_beginning(arguments: Arguments, run_dir: Path) -> None:
    """Write every flag in force, and earlier restarts. Raises ConfigurationError if that fails."""
    restarts = own_restarts()
    try:
        (run_dir / CONFIG_FILE).write_text(to_toml(arguments))
        write_restarts(run_dir, restarts)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {run_dir}: {error}") from error
    if restarts:
        log.warning("the run was restarted", times=len(restarts), **to_builtins(restarts[-1]))


def with_absolute_paths(arguments: Arguments) -> Arguments:
    """The same arguments, every path absolute: workers on other nodes have another working directory."""
    groups = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    return replace(arguments, **{name: _absolute(group) for name, group in groups.items()})


def _absolute(group: Group) -> Group:
    values = {field.name: getattr(group, field.name) for field in fields(group)}
    paths: dict[str, object] = {name: value.absolute() for name, value in values.items() if isinstance(value, Path)}
    match group:
        case EvaluationArguments(eval_prompt_data=tuple(words)):
            data_sets = parse_data_sets(words)
            named = ((name, absolute(place)) for name, place in data_sets.items())
            paths["eval_prompt_data"] = tuple(word for words in named for word in words)
        case DataArguments():
            if group.prompt_data is not None:
                paths["prompt_data"] = absolute_words(group.prompt_data)
            paths["pass_rates"] = tuple(str(Path(directory).absolute()) for directory in group.pass_rates)
        case SessionsArguments(environment_python=str(program)) if "/" in program:  # else it is looked for on PATH
            paths["environment_python"] = str(Path(program).absolute())
    return replace(group, **paths)
