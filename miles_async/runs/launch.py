"""From a :class:`Config` to a run: what ``miles-async train`` and the process of ``miles_async.start`` call.

Flags, model, prompts and hooks are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import replace

from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.live import with_kept
from miles_async.arguments.server_groups import ServerGroup, server_groups
from miles_async.arguments.validation import validate
from miles_async.checkpoints.files import find_checkpoint
from miles_async.checkpoints.start import kept_settings, resumption_notes, where_to_resume
from miles_async.runs.checks import check_hooks, check_surroundings
from miles_async.runs.config import Config, expect_config
from miles_async.runs.counts import with_counts
from miles_async.runs.keep_running import keep_running
from miles_async.runs.notes import run_notes
from miles_async.runs.prompt_checks import check_prompts, check_tokenizer
from miles_async.runtime.cluster.ray_address import VARIABLE, with_ray_address
from miles_async.runtime.device import choose_device, with_precision
from miles_async.wiring.early_imports import early_imports
from miles_async.wiring.environments import try_environment
from miles_async.wiring.generated_prompts import with_generated_prompts

Show = Callable[[str], None]


def check(config: Config) -> str:
    """Check flags, machine, model, prompts and hooks as a start does, and start nothing: ``--dry-run``.

    Hooks are those that flags name. Loads transformers, and torch where memory of GPUs is counted.

    Returns a description of the run that would start, with notes. Raises ConfigurationError, DataError.
    """
    expect_config(config)
    with chdir(config.directory):
        arguments, beginning = _complete(config)
        prompts, notes = _check(arguments)
        try_environment(arguments.sessions)
        notes += [*beginning, *check_tokenizer(arguments)]
        memory = "" if arguments.evaluation.eval_only else _memory(arguments)
        notes += [*run_notes(arguments), *config.parsed.notes]
    return "\n".join([summarize(arguments, prompts), *(f"  note: {note}" for note in notes)]) + "\n" + memory


def launch(config: Config, show: Show) -> int:
    """Check, then run in this process to the end, which signals may bring earlier. Returns the exit code.

    ``show`` gets the notes. Raises what :func:`check` and :func:`wiring.driver_process.run` do.
    """
    arguments, beginning = _complete(config)
    if config.parsed.notes:
        show(
            f"{len(config.parsed.notes)} flags of other systems change nothing here, or mean less: "
            "--dry-run lists them\n"
        )
    if arguments.checkpoint.max_run_restarts:
        _check(arguments)
        run_dir, staging = arguments.observability.run_dir, arguments.weights.weight_staging_dir
        return keep_running(config.words, arguments.checkpoint, run_dir, staging)
    with early_imports(arguments) as imports:  # while this process checks and imports by itself
        _, notes = _check(arguments)
        for note in (*beginning, *notes, *run_notes(arguments)):
            show(f"note: {note}\n")
        if arguments.cluster.ray_address and not config.arguments.cluster.ray_address:
            show(f"Ray: joining the cluster at {arguments.cluster.ray_address}, as {VARIABLE} says\n")
        from miles_async.wiring.driver_process import run  # here, since it brings Ray with it

        return run(arguments, imports)


def _complete(config: Config) -> tuple[Arguments, list[str]]:
    """Return the arguments with what checkpoint, generated prompts, cluster and device decide, and notes on these.

    Raises ConfigurationError.
    """
    cluster, checkpoint = with_ray_address(config.arguments.cluster), config.arguments.checkpoint
    load = where_to_resume(checkpoint.save, checkpoint.load)
    arguments = replace(config.arguments, cluster=cluster, checkpoint=replace(checkpoint, load=load))
    arguments, notes = with_kept(arguments, kept_settings(load))
    if load != checkpoint.load:
        notes.append(f"--load {checkpoint.load}: no checkpoint there yet, the run begins")
    arguments = with_generated_prompts(arguments)
    validate(arguments, config.parsed.checks)
    if (counted := with_counts(arguments)) != arguments:
        arguments = counted
        validate(arguments)
    if load is not None and not arguments.evaluation.eval_only:
        notes += resumption_notes(load, arguments.rollout.num_rollout)
    return replace(arguments, model=with_precision(arguments.model, cluster)), notes  # may load torch


def _check(arguments: Arguments) -> tuple[dict[str, int], list[str]]:
    """Check the machine and what the flags name. Returns the number of prompts in each file, and notes.

    Raises ConfigurationError, DataError.
    """
    notes = check_surroundings(arguments)
    check_hooks(arguments)
    prompts, lacking = check_prompts(arguments)
    return prompts, [*notes, *lacking]


def _memory(arguments: Arguments) -> str:
    """Return the tables of memory where GPUs are meant; a CPU run takes what the machine has."""
    cluster = arguments.cluster
    if arguments.model.train_backend != "megatron" or (
        cluster.gpu_memory_gb is None and choose_device(cluster.device) == "cpu"
    ):
        return ""
    from miles_async.runs.memory import memory_report  # here, since it brings torch with it

    return memory_report(arguments)


def summarize(arguments: Arguments, prompts: Mapping[str, int]) -> str:
    """Describe the run that would start, for people."""
    cluster, supervised = arguments.cluster, arguments.algorithm.supervised
    alone = arguments.evaluation.eval_only
    ranks = f"{cluster.trainer_world_size} ranks on {cluster.device}: " + ", ".join(
        f"{name} {size}" for name, size in arguments.layout.items() if size > 1 or name == "DP"
    )
    lines = {
        "model": arguments.model.hf_checkpoint,
        "trainer": "none" if alone else ranks,
        **({} if supervised else {"engines": "; ".join(map(_describe_group, server_groups(arguments)))}),
        **{f"prompts {number}": f"{path} ({count})" for number, (path, count) in enumerate(prompts.items(), start=1)},
        **_work(arguments),
        "Ray": f"joins the cluster at {cluster.ray_address}" if cluster.ray_address else "a cluster of the run's own",
        "run directory": arguments.observability.run_dir,
        **({"resumes from": find_checkpoint(arguments.checkpoint.load).directory} if arguments.checkpoint.load else {}),
    }
    return "Dry run: flags, model, tokenizer, prompts and hooks are in order. Nothing was started.\n" + "\n".join(
        f"  {name:<14} {value}" for name, value in lines.items()
    )


def _work(arguments: Arguments) -> Mapping[str, str]:
    """Describe what the run trains on, or evaluates."""
    evaluation, rollout, staleness = arguments.evaluation, arguments.rollout, arguments.staleness
    if evaluation.eval_only:
        sets = (
            f"{each.name}: {each.samples(evaluation)} samples per prompt at temperature "
            f"{each.temperature_in_force(evaluation, rollout):g}"
            for each in evaluation_sets(evaluation)
        )
        return {"evaluation": "; ".join(sets), "reward": _rewarded(arguments)}
    batches = f"{rollout.num_rollout} steps of {rollout.rollout_batch_size}"
    steps = f"{arguments.optimizer_steps_per_rollout} optimizer step(s) each"
    if arguments.algorithm.supervised:
        return {"fine-tuning": f"supervised, {batches} examples, {steps}; no engines"}
    bound = "not bounded" if staleness.bound is None else f"at most {staleness.bound}"
    return {
        "rollout": f"{batches} prompts × {rollout.n_samples_per_prompt} samples, {steps}",
        "staleness": f"age {bound}, {staleness.lead} batch(es) admitted ahead",
        "reward": _rewarded(arguments),
    }


def _rewarded(arguments: Arguments) -> str:
    """Rewards that flags name, or who else may give them."""
    if arguments.rewards.named is not None or not arguments.sessions.may_reward:
        return arguments.rewards.named or "none"
    return "the agent's" if arguments.sessions.runs_agent else "the environment's"


def _describe_group(group: ServerGroup) -> str:
    kind = "external, " if group.external else ""
    kind += "" if group.role == "train" else f"{group.role}, "
    return f"{group.name}: {group.num_engines} ({kind}{group.gpus_per_engine} GPUs each; CPU: processes)"
