"""Check the flags that leave one side of a run out, or profile a step."""

from __future__ import annotations

import os
from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.debug import STEP_FIELD, file_of_step
from miles_async.arguments.problems import given


def check_debug(arguments: Arguments) -> Iterator[str]:
    """Check that at least one side runs and has its inputs, and that no flag needs a side that does not run."""
    debug, checkpoint = arguments.debug, arguments.checkpoint
    if debug.debug_rollout_only and (debug.debug_train_only or debug.load_debug_rollout_data is not None):
        trains = "--debug-train-only" if debug.debug_train_only else "--load-debug-rollout-data"
        yield f"--debug-rollout-only and {trains} leave each other's side out: give one of them"
    elif debug.exports and None in (checkpoint.load, checkpoint.save_hf):
        yield (
            "--debug-train-only without --load-debug-rollout-data: give what to train on, or --load and --save-hf to "
            "export a checkpoint"
        )
    for flag, template in {
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--load-debug-rollout-data": debug.load_debug_rollout_data,
    }.items():
        if template is not None and template.suffix != ".parquet":
            yield f"{flag} {template}: expected a name that ends with .parquet, the format of these files"
    saved = debug.save_debug_rollout_data
    if saved is not None and STEP_FIELD not in str(saved) and arguments.rollout.num_rollout > 1:
        yield f"--save-debug-rollout-data {saved}: every step would replace it; put {STEP_FIELD} into its name"
    if saved is not None and debug.sides == "trainer":
        yield "--save-debug-rollout-data without a rollout side, which makes the data: leave it out"
    loaded = debug.load_debug_rollout_data
    if loaded is not None and checkpoint.load is None and not os.path.isfile(first := file_of_step(loaded, 1)):
        yield f"--load-debug-rollout-data {loaded}: there is no file {first}"
    if debug.sides == "both":
        return
    alone = "--debug-rollout-only" if debug.sides == "rollout" else "--debug-train-only"
    needing: dict[str, object] = {"--save": checkpoint.save}
    if debug.sides == "rollout":
        needing |= {"--save-hf": checkpoint.save_hf, "--load": checkpoint.load}
        needing["--rollout-external"] = arguments.engines.rollout_external
    for flag in given(needing):
        yield f"{flag} with {alone}, which has no use for it: leave it out"


def check_profiling(arguments: Arguments) -> Iterator[str]:
    """Check that the step and the ranks to profile exist."""
    debug, steps = arguments.debug, arguments.rollout.num_rollout
    if debug.profile_step is None:
        return
    if debug.profile_step > steps and arguments.rollout.num_epoch is None:
        yield f"--profile-step {debug.profile_step}: the run ends after step {steps} (--num-rollout)"
    if debug.sides == "rollout":
        yield f"--profile-step {debug.profile_step} with --debug-rollout-only, which trains nothing: leave it out"
    try:
        debug.profiled_ranks(arguments.cluster.trainer_world_size)
    except ValueError as error:
        yield f"--profile-ranks: {error}"
