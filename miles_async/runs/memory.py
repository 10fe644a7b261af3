"""Memory that a run needs per GPU: ``miles-async plan --memory``, and a part of ``miles-async train --dry-run``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from miles_async.algorithms.objective import make_objective
from miles_async.arguments import Arguments
from miles_async.arguments.model import RecomputeGranularity
from miles_async.arguments.model_files import read_config
from miles_async.arguments.prompt_limit import engine_context
from miles_async.arguments.server_groups import pinned_versions
from miles_async.backends.megatron.memory.plan import (
    RECOMPUTED,
    RankBytes,
    measure,
    model_parameters,
    rank_bytes,
)
from miles_async.backends.megatron.memory.stages import StageMemory, StageRequest
from miles_async.errors import ConfigurationError
from miles_async.runs.engine_memory import GIB, EngineBytes, engine_bytes
from miles_async.weights.fp8 import published_bytes
from miles_async.weights.staging_options import KEPT_VERSIONS, StagingOptions
from miles_async.weights.transports.choice import count_senders

NOTES = """\
Counted with Megatron's own model on fake tensors: host layers, where Transformer Engine's fuse some; one sequence of
--max-tokens-per-gpu tokens; experts that get equal shares. Not counted: CUDA's context, NCCL's buffers, fragmentation,
what a vision tower makes of images.
Host copy: host memory from which the first of the data-parallel ranks writes checkpoints (--async-save with --save).
Kept weights: host memory of every rank for weights of earlier versions (--prox-logp-method snapshots).
"""


def memory_report(arguments: Arguments) -> str:
    """Return tables for trainer ranks and engines. Raises ConfigurationError if ``--gpu-memory-gb`` is too little."""
    model = arguments.model
    world_size = arguments.cluster.trainer_world_size
    objective = make_objective(arguments.algorithm, kept_versions=arguments.staleness.versions)
    needs = objective.needs
    measured = measure(
        StageRequest(
            directory=model.directory,
            model=model,
            world_size=world_size,
            tokens=arguments.most_tokens_per_rank,
            logprob_chunk=arguments.optimizer.logprob_chunk,
            temperature=arguments.rollout.rollout_temperature,
            entropy="entropy" in needs,
        )
    )
    stages = measured[model.recompute_granularity]
    ranks = [
        rank_bytes(
            stage,
            model,
            world_size,
            # Without its adapters, the model is the reference itself.
            reference="ref_logprobs" in needs and not (model.lora_rank and not arguments.algorithm.ref_hf_checkpoint),
            critic="values" in needs,
            bucket=arguments.weights.update_weight_buffer_size,
            copies_saves=arguments.checkpoint.save is not None and arguments.checkpoint.async_save,
            kept_versions=objective.kept_versions if objective.old_policy == "kept" else 0,
        )
        for stage in stages
    ]
    engines = list(engine_bytes(arguments, model_parameters(stages, model)))
    problems = list(_problems(arguments, ranks, engines))
    if problems:
        raise ConfigurationError("; ".join(problems))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(_trainer_table(arguments, ranks))
        console.print(_activation_table(arguments, measured, ranks))
        if engines:
            console.print(_engine_table(engines))
    return capture.get() + _publication(arguments, model_parameters(stages, model)) + NOTES


def _publication(arguments: Arguments, parameters: int) -> str:
    """Room on the hosts of sending ranks, and the least speed that ``--publication-timeout`` allows."""
    weights, model = arguments.weights, arguments.model
    if arguments.sides != "both":
        return ""
    senders = count_senders(weights, model.pipeline_model_parallel_size)
    config, item = read_config(model.directory), 2 if model.bf16 else 4
    whole = published_bytes(config, parameters, item=item, quantization=weights.rollout_quantization)
    share = whole // senders
    staging = StagingOptions(
        version_bytes=share,
        bucket_bytes=weights.update_weight_buffer_size,
        keep=KEPT_VERSIONS + weights.debug_publication_lag,
        pinned=pinned_versions(arguments),
        delta=weights.delta_encoding,
    )
    return (
        f"Publication: {_gib(share)} GiB from each of {senders} sending ranks, as much host memory for its copy, and "
        f"up to {_gib(staging.room or 0)} GiB of files for {staging.versions} versions (--weight-staging-dir). Sending "
        f"may take --publication-timeout {weights.publication_timeout:g} s: "
        f"{share / weights.publication_timeout / 1e9:.2g} GB/s per rank at least.\n"
    )


def _problems(arguments: Arguments, ranks: Sequence[RankBytes], engines: Sequence[EngineBytes]) -> Iterator[str]:
    memory = arguments.cluster.gpu_memory_gb
    if memory is None:
        return
    fullest = max(ranks, key=lambda rank: rank.total)
    if fullest.total > memory * GIB:
        yield (
            f"a trainer rank of pipeline stage {fullest.stages.start} needs {_gib(fullest.total)} GiB and "
            f"--gpu-memory-gb is {memory:g}: weights {_gib(fullest.weights)}, gradients {_gib(fullest.gradients)}, "
            f"optimizer {_gib(fullest.optimizer)}, reference {_gib(fullest.reference)}, critic "
            f"{_gib(fullest.critic)}, activations {_gib(fullest.activations)}; raise "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size or --actor-num-nodes, lower "
            "--max-tokens-per-gpu (a longer sample gets its own micro-batch), or give --recompute-granularity full, or "
            "--optimizer-cpu-offload --use-precision-aware-optimizer"
        )
    context = engine_context(arguments)
    longest = arguments.longest_sample if context is None else min(arguments.longest_sample, context.tokens)
    for engine in engines:
        if engine.cache_tokens is not None and engine.cache_tokens < longest:
            yield (
                f"an engine of group {engine.group.name} has room for {engine.cache_tokens} tokens next to "
                f"{_gib(engine.weights)} GiB of weights per GPU, and a sample may have {longest}: give it more GPUs "
                "(--rollout-num-gpus-per-engine or gpus_per_engine), or lower --rollout-max-response-len"
            )


def _trainer_table(arguments: Arguments, ranks: Sequence[RankBytes]) -> Table:
    trainer = Table(
        "stage", "weights", "gradients", "optimizer", "reference", "critic", "activations", "staging", "sum",
        "host copy", "kept weights",
        title=f"Trainer, GiB per rank, micro-batches of {arguments.most_tokens_per_rank} tokens",
    )  # fmt: skip
    for rank in ranks:
        numbers = (
            rank.weights, rank.gradients, rank.optimizer, rank.reference, rank.critic, rank.activations, rank.staging,
            rank.total, rank.saved_copy, rank.kept_weights,
        )  # fmt: skip
        trainer.add_row(_stage_name(rank, ranks), *map(_gib, numbers))
    return trainer


def _activation_table(
    arguments: Arguments,
    measured: Mapping[RecomputeGranularity | None, Sequence[StageMemory]],
    ranks: Sequence[RankBytes],
) -> Table:
    """Activations by recomputation, and what of them is logits."""
    chosen, optimizer = arguments.model.recompute_granularity, arguments.optimizer
    tokens = min(optimizer.logprob_chunk, arguments.most_tokens_per_rank)
    names = {each: f"{each or 'none'}{' (chosen)' if each == chosen else ''}" for each in RECOMPUTED}
    table = Table("stage", *names.values(), f"of which logits of {tokens} tokens", title=(
        "Activations by --recompute-granularity, GiB per rank"
    ))  # fmt: skip
    last = arguments.model.pipeline_model_parallel_size
    for index, rank in enumerate(ranks):
        activations = (_gib(measured[each][index].activations) if each in measured else "refused" for each in names)
        logits = _logits(arguments, tokens) if rank.stages.stop == last else 0
        table.add_row(_stage_name(rank, ranks), *activations, _gib(logits))
    return table


def _logits(arguments: Arguments, tokens: int) -> int:
    """Bytes of so many tokens' fp32 logits on a rank of the last pipeline stage."""
    vocabulary = int(read_config(arguments.model.directory).get("vocab_size") or 0)
    return 4 * tokens * vocabulary // arguments.model.tensor_model_parallel_size


def _stage_name(rank: RankBytes, ranks: Sequence[RankBytes]) -> str:
    first, last = rank.stages.start, rank.stages.stop - 1
    name = f"{first}" if first == last else f"{first} to {last}"
    fullest = max(ranks, key=lambda rank: rank.total)
    return name + (" (fullest)" if rank is fullest and len(ranks) > 1 else "")


def _engine_table(engines: Sequence[EngineBytes]) -> Table:
    served = Table("group", "GPUs each", "weights, GiB", "cache, bytes per token", "tokens", title="Engines, per GPU")
    for engine in engines:
        caches = f"{engine.caches} × " if engine.caches > 1 else ""
        tokens = "with --gpu-memory-gb" if engine.cache_per_token else "unknown"
        if engine.cache_tokens is not None:
            tokens = f"{caches}{engine.cache_tokens:,}"
        served.add_row(
            engine.group.name,
            str(engine.group.gpus_per_engine),
            _gib(engine.weights),
            f"{engine.cache_per_token:,}" if engine.cache_per_token else "unknown",
            tokens,
        )
    return served


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count >= GIB / 10 or not count else f"{count / GIB:.2g}"
