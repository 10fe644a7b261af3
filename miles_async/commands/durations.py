"""How long the parts of a planned run take: as given, as a run measured them, or estimated from a data sheet."""

from __future__ import annotations

import argparse

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import read_config
from miles_async.commands.engine_memory import engine_bytes
from miles_async.commands.measured import describe as describe_measured
from miles_async.commands.measured import measured
from miles_async.engines.sglang.cpu_memory import cache_bytes_per_token
from miles_async.errors import ConfigurationError
from miles_async.simulation.distributions import Fixed, parse_distribution
from miles_async.simulation.estimates import GB, GPUS, Assumptions, Estimate, Job, describe, estimate
from miles_async.simulation.plan import Timing
from miles_async.train_data.work import model_work


def durations(own: argparse.Namespace, arguments: Arguments) -> tuple[Timing, int | None, str]:
    """Durations and slots as given, or else as measured with ``--from`` or estimated with ``--gpu``, and what these
    say.
    """
    given = {
        flag: parse_distribution(text, flag)
        for flag, text in (
            ("--latency", own.latency),
            ("--train-seconds", own.train_seconds),
            ("--publish-seconds", own.publish_seconds),
        )
        if text is not None
    }
    copy, slots, text = own.copy_seconds, own.engine_slots, ""
    if own.gpu is not None:
        assumed = Assumptions(mfu=own.mfu, decode_use=own.decode_use, link=own.link_gbytes * GB)
        found = _estimate(own, arguments, assumed)
        given = {
            "--latency": found.response,
            "--train-seconds": Fixed(found.train_seconds),
            "--publish-seconds": Fixed(found.publish_seconds),
        } | given
        copy = found.copy_seconds if copy is None else copy
        slots, text = found.slots, describe(found, assumed)
    if own.run_dir is not None:
        seen = measured(own.run_dir)
        given = {
            "--latency": seen.response,
            "--train-seconds": seen.train,
            "--publish-seconds": seen.publish,
        } | given
        copy = seen.copy_seconds if copy is None else copy
        text = describe_measured(seen, own.run_dir)
    if missing := [flag for flag in ("--latency", "--train-seconds") if flag not in given]:
        raise ConfigurationError(
            f"the following arguments are required: {', '.join(missing)}; or, to have them estimated, --gpu and "
            "--response-tokens, or --from with the directory of a run"
        )
    timing = Timing(
        response=given["--latency"],
        environment=parse_distribution(own.environment_seconds, "--environment-seconds"),
        reward=parse_distribution(own.reward_seconds, "--reward-seconds"),
        train=given["--train-seconds"],
        publish=given.get("--publish-seconds", Fixed(0.0)),
        copy_seconds=copy or 0.0,
        start_seconds=0.0,
    )
    return timing, slots, text


def _estimate(own: argparse.Namespace, arguments: Arguments, assumed: Assumptions) -> Estimate:
    directory = arguments.model.hf_checkpoint
    config = {} if directory is None else read_config(directory)
    work = model_work(config)
    if work is None or own.response_tokens is None:
        raise ConfigurationError(
            "--gpu estimates durations from --hf-checkpoint (a directory with config.json; weights are not read) and "
            f"--response-tokens: {'--response-tokens is missing' if work else f'no sizes in {directory}/config.json'}"
        )
    model, algorithm, cluster = arguments.model, arguments.algorithm, arguments.cluster
    engines = [engine for engine in engine_bytes(arguments, work.weights) if engine.group.role == "train"]
    if not engines:
        raise ConfigurationError("--gpu estimates engines that the run starts, not external ones: give --latency")
    engine = engines[0]
    several_steps = arguments.global_batch_size < arguments.rollout.samples_per_rollout
    job = Job(
        samples=arguments.rollout.samples_per_rollout,
        prompt_tokens=own.prompt_tokens,
        trainer_gpus=cluster.trainer_world_size,
        senders=model.pipeline_model_parallel_size,
        recompute=model.recompute_granularity == "full",
        scoring_passes=int(algorithm.use_kl_loss) + int(not algorithm.use_rollout_logprobs and several_steps),
        engine_gpus=engine.group.gpus_per_engine,
        slots=own.engine_slots or arguments.rollout.rollout_concurrency_per_engine,
        cache_tokens=engine.cache_tokens,
        bytes_per_weight=2 if model.bf16 else 4,
        cache_per_token=cache_bytes_per_token(config, "bfloat16" if model.bf16 else "float32") or 0,
    )
    return estimate(job, work, GPUS[own.gpu], parse_distribution(own.response_tokens, "--response-tokens"), assumed)
