"""Arguments of evaluation alone (``--eval-only``), derived from training's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from miles_async.arguments import Arguments
from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.errors import ConfigurationError


def rollout_as_evaluation(arguments: Arguments) -> Arguments:
    """Evaluate ``--prompt-data`` as training would sample it, instead of what training evaluates. Raises
    ConfigurationError without it.
    """
    rollout, evaluation, data = arguments.rollout, arguments.evaluation, arguments.data
    if data.prompt_data is None:
        instead = "; `miles-async eval` evaluates --eval-prompt-data and --eval-config" if evaluation.evaluates else ""
        raise ConfigurationError(f"--prompt-data is required: prompts to sample, .jsonl or .parquet{instead}")
    evaluation = replace(
        evaluation,
        eval_prompt_data=data.prompt_data,
        eval_config=None,
        n_samples_per_eval_prompt=rollout.n_samples_per_prompt,
        eval_temperature=rollout.rollout_temperature,
        eval_top_p=rollout.rollout_top_p,
        eval_top_k=rollout.rollout_top_k,
        eval_max_response_len=None,
        eval_interval=None,
    )
    return replace(arguments, evaluation=evaluation)


def evaluation_alone(arguments: Arguments) -> Arguments:
    """Arguments with which a run does nothing but evaluate.

    Raises ConfigurationError if there is nothing to evaluate.
    """
    evaluation = arguments.evaluation
    data_sets = evaluation_sets(evaluation)
    if not data_sets:
        raise ConfigurationError(
            "--eval-prompt-data, --eval-config or --environment-eval-prompts is required: prompts to evaluate on"
        )
    rollout = arguments.rollout
    length = max(each.response_length(evaluation, rollout)[1] for each in data_sets)
    others = evaluation.eval_max_response_len or rollout.rollout_max_response_len  # whose file gives no length
    return replace(
        arguments,
        evaluation=replace(evaluation, eval_only=True, eval_max_response_len=others),
        # None of these is dispatched.
        data=replace(arguments.data, prompt_data=arguments.data.prompt_data or (data_sets[0].path,), pass_rates=()),
        rollout=replace(rollout, rollout_max_response_len=length),
        checkpoint=CheckpointArguments(),  # no flag about saving is left without the --save that it needs
    )


def check_evaluation_alone(arguments: Arguments) -> Iterator[str]:
    """Check flags that evaluation alone cannot follow."""
    if not arguments.has_reward:
        yield "no reward: give --rm-type (math, for instance) or --custom-rm-path module:attr"
    if not arguments.observability.save_samples:
        yield "--save-samples 0 with --eval-only, whose estimates are made of the samples: leave it out"
    if arguments.engines.rollout_external:
        yield "--rollout-external with --eval-only: engines of others may serve any weights; leave it out"
    with suppress(ConfigurationError):  # reported by check_server_groups
        for group in of_role(server_groups(arguments), "evaluation"):
            yield (
                f"--server-groups {arguments.engines.server_groups}: role evaluation of group {group.name} with "
                "--eval-only, where nothing is trained: give it the role train"
            )
    if arguments.cluster.colocate:
        yield "--colocate with --eval-only, where no trainer takes turns with the engines: leave it out"
