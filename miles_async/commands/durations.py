"""Durations of a planned run's parts: as given, as a run measured them, or estimated from a data sheet."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import read_config
from miles_async.commands.gpu_report import GpuReport, read_report
from miles_async.commands.measured import describe as describe_measured
from miles_async.commands.measured import measured
from miles_async.errors import ConfigurationError
from miles_async.runs.engine_memory import engine_bytes
from miles_async.simulation.distributions import Distribution, Fixed, parse_distribution
from miles_async.simulation.estimates import (
    GB,
    GPUS,
    Assumptions,
    Estimate,
    Job,
    Passes,
    Publication,
    Transport,
    describe,
    estimate,
    publication,
)
from miles_async.train_data.work import ModelWork, model_work
from miles_async.weights.fp8 import published_bytes
from miles_async.weights.transports.choice import count_senders, find_transport

PARTS = ("--latency", "--train-seconds", "--publish-seconds")  # the last one is 0 by default
COMPARED = ("distributed", "disk", "object_store")  # transports that a plan shows next to the run's
SENT = {"xor": {"bf16": 0.03, "fp32": 0.43}, "overwrite": {"bf16": 0.04, "fp32": 0.84}}
"""Share of the bytes that ``--weight-delta`` sends, by dtype: docs/benchmarks.md, deltas, for steps of 1e-6, where 3 %
of the elements of bfloat16 weights change, and all of float32 ones.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations on the user's machines, with the flags as given."""

    response: Distribution  # of its tokens, on a slot
    environment: Distribution  # of one sample, without tokens; it is in flight meanwhile
    reward: Distribution  # of one sample that is generated
    train: Distribution  # one rollout step
    publish: Distribution
    copy_seconds: float


def durations(own: argparse.Namespace, arguments: Arguments) -> tuple[Timing, int | None, str]:
    """Durations and engine slots, and a text on their origin: given, measured (``--from``) or estimated (``--gpu``)."""
    asked = zip(PARTS, (own.latency, own.train_seconds, own.publish_seconds), strict=True)
    given = {flag: parse_distribution(text, flag) for flag, text in asked if text is not None}
    known: tuple[Distribution, ...] = ()
    copy, slots, text = 0.0, own.engine_slots, ""
    if own.gpu is not None:
        report = None if own.gpu in GPUS else read_report(Path(own.gpu))
        assumed, from_report = _assumptions(own, report, arguments.weights.weight_transport)
        found, compared = _estimate(own, arguments, report)
        known = found.response, Fixed(found.train_seconds), Fixed(found.publication.pause_seconds)
        copy, slots = found.publication.copy_seconds, found.slots
        text = describe(found, compared, assumed, from_report, "" if report is None else report.origin)
    if own.run_dir is not None:
        seen = measured(own.run_dir)
        known, copy = (seen.response, seen.train, seen.publish), seen.copy_seconds
        text = describe_measured(seen, own.run_dir)
    given = dict(zip(PARTS, known, strict=False)) | given
    if missing := [flag for flag in PARTS[:2] if flag not in given]:
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
        copy_seconds=copy if own.copy_seconds is None else own.copy_seconds,
    )
    return timing, slots, text


def _assumptions(
    own: argparse.Namespace, report: GpuReport | None, transport: str
) -> tuple[Assumptions, frozenset[str]]:
    """Return the assumptions for ``transport``, and the fields among them that the report measured."""
    measured = {} if report is None else report.shares_of(transport)
    link = None if own.link_gbytes is None else own.link_gbytes * GB
    given = {"mfu": own.mfu, "decode_use": own.decode_use, "link": link}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(Assumptions(), **{**measured, **given}), frozenset(measured.keys() - given.keys())


def _estimate(
    own: argparse.Namespace, arguments: Arguments, report: GpuReport | None
) -> tuple[Estimate, list[Publication]]:
    """Estimate the run, and publications by each transport that is compared."""
    directory = arguments.model.hf_checkpoint
    config = {} if directory is None else read_config(directory)
    work = model_work(config)
    if work is None or own.response_tokens is None:
        raise ConfigurationError(
            "--gpu estimates durations from --hf-checkpoint (a directory with config.json; weights are not read) and "
            f"--response-tokens: {'--response-tokens is missing' if work else f'no sizes in {directory}/config.json'}"
        )
    job = job_of(arguments, work, own.prompt_tokens, own.engine_slots)
    tokens = parse_distribution(own.response_tokens, "--response-tokens")
    assumed, _ = _assumptions(own, report, job.transport.name)
    found = estimate(job, work, GPUS[report.gpu if report else own.gpu], tokens, assumed)
    weights = work.weights * job.bytes_per_weight
    return found, [
        publication(_transport(arguments, name), weights, _assumptions(own, report, name)[0])
        for name in dict.fromkeys((*COMPARED, job.transport.name))
    ]


def job_of(arguments: Arguments, work: ModelWork, prompt_tokens: int, slots: int | None = None) -> Job:
    """Raises ConfigurationError if the run starts no engines. ``slots``: of an engine, if not by its flag."""
    model, cluster = arguments.model, arguments.cluster
    engines = [engine for engine in engine_bytes(arguments, work.weights) if engine.group.role == "train"]
    if not engines:
        raise ConfigurationError("--gpu estimates engines that the run starts, not external ones: give --latency")
    engine, config = engines[0], read_config(model.directory)
    quantization = arguments.weights.rollout_quantization
    size = published_bytes(config, work.weights, item=2 if model.bf16 else 4, quantization=quantization)
    return Job(
        samples=arguments.rollout.samples_per_rollout,
        prompt_tokens=prompt_tokens,
        trainer_gpus=cluster.trainer_world_size,
        transport=_transport(arguments, arguments.weights.weight_transport),
        recompute=model.recompute_granularity == "full",
        passes=_passes(arguments),
        engine_gpus=engine.group.gpus_per_engine,
        slots=slots or arguments.rollout.rollout_concurrency_per_engine,
        caches=engine.caches,
        cache_tokens=None if engine.cache_tokens is None else engine.caches * engine.cache_tokens,
        bytes_per_weight=size / work.weights,
        cache_per_token=engine.cache_per_token * engine.group.gpus_per_engine // engine.caches,
    )


def _transport(arguments: Arguments, name: str) -> Transport:
    weights = replace(arguments.weights, weight_transport=name)
    spec, delta = find_transport(name), weights.delta_encoding
    return Transport(
        name=name,
        senders=count_senders(weights, arguments.model.pipeline_model_parallel_size),
        loads_files=spec.shared_files or spec.delta,
        shares_files=spec.shared_files,
        sent=SENT[delta]["bf16" if arguments.model.bf16 else "fp32"] if delta is not None and spec.delta else 1.0,
    )


def _passes(arguments: Arguments) -> Passes:
    """Count the passes of policy, reference and critic over a rollout batch, as ``backends/megatron/step.py`` makes
    them.
    """
    from miles_async.algorithms.objective import make_objective  # here, since it brings torch with it

    objective = make_objective(arguments.algorithm, kept_versions=arguments.staleness.versions)
    needs, epochs = objective.needs, arguments.optimizer.ppo_epochs
    has_critic = "values" in needs
    training = epochs + (epochs * arguments.critic.critic_updates_per_step if has_critic else 0)
    training += 1 if objective.weighs_trajectories else 0  # a separate pass per trajectory
    scoring = float(len(needs & {"ref_logprobs", "trainer_logprobs", "values"}))
    scoring += "entropy" in objective.needs_of_transforms
    if "old_logprobs" in needs and objective.old_policy in ("trainer", "kept"):
        early = "old_logprobs" in objective.needs_of_transforms
        # The first optimizer step finds them in its own forward pass, unless it comes again.
        found = objective.old_policy == "trainer" and epochs == 1 and not early
        scoring += 1 - 1 / arguments.optimizer_steps_per_rollout if found else 1
    return Passes(training=training, scoring=scoring)
