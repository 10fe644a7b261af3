"""Durations of a run's parts by arithmetic: data sheets, config.json, and a handful of assumptions that are printed.

For the time before anything was measured. Whoever has measured durations gives those instead, part by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from miles_async.simulation.distributions import Distribution, median
from miles_async.simulation.plan import scaled
from miles_async.train_data.work import ModelWork

GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU by its data sheet."""

    flops: float  # per second, dense bf16
    bandwidth: float  # bytes per second of its memory


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # NVIDIA's data sheets of the SXM modules, without sparsity.
        "a100": Gpu(flops=312e12, bandwidth=2039e9),
        "h100": Gpu(flops=989e12, bandwidth=3350e9),
        "h200": Gpu(flops=989e12, bandwidth=4800e9),
        "b200": Gpu(flops=2250e12, bandwidth=7700e9),
    }
)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What data sheets don't tell. Defaults are guesses to be replaced."""

    mfu: float = 0.35  # share of the FLOP/s that training reaches
    decode_use: float = 0.5  # share of the memory's bandwidth that decoding reaches
    link: float = 50 * GB  # bytes per second from one sender to the engines: a 400 Gb/s adapter
    copy: float = 20 * GB  # bytes per second from one GPU to host memory
    cpu_per_sample: float = 1e-3  # seconds of the rollout process; docs/benchmarks.md, answers of 8k tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The flags that durations depend on."""

    samples: int  # per rollout step
    prompt_tokens: int
    trainer_gpus: int
    senders: int  # trainer ranks that send weights: one per pipeline stage
    recompute: bool  # full recomputation: one more forward pass
    scoring_passes: int  # forward passes beside the step's own: old policy, reference
    engine_gpus: int  # of one engine
    slots: int  # requests that an engine runs at once, if its cache has room
    cache_tokens: int | None  # that an engine has room for; None: not known
    bytes_per_weight: int
    cache_per_token: int  # bytes of keys and values, of the whole model


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of the parts, and what they come from."""

    response: Distribution
    train_seconds: float
    copy_seconds: float
    publish_seconds: float
    token_seconds: float  # between two tokens of a response
    slots: int  # requests that an engine runs at once
    rollout_cpu_seconds: float  # of the rollout process, per rollout step


def estimate(
    job: Job, work: ModelWork, gpu: Gpu, response_tokens: Distribution, assumed: Assumptions = Assumptions()
) -> Estimate:
    """Estimate all parts.

    Training: 6 FLOPs per weight that a token passes through and per token (2 forward, 4 backward), and attention's;
    decoding: weights and cache read from memory once per token of all running requests, or the FLOPs if they take
    longer; weights: bf16 or fp32 bytes over links and copies, senders side by side.
    """
    length, context = job.prompt_tokens + median(response_tokens), job.prompt_tokens + median(response_tokens) / 2
    slots = job.slots if job.cache_tokens is None else max(1, min(job.slots, int(job.cache_tokens / context)))
    forward = 2 * job.samples * work.sequence_flops(length)
    passes = 3 + (1 if job.recompute else 0) + job.scoring_passes
    token_seconds = _token_seconds(replace(job, slots=slots), work, gpu, context, assumed)
    weights = work.weights * job.bytes_per_weight
    return Estimate(
        response=scaled(response_tokens, token_seconds),
        train_seconds=forward * passes / (job.trainer_gpus * gpu.flops * assumed.mfu),
        copy_seconds=weights / (job.senders * assumed.copy),
        publish_seconds=weights / (job.senders * assumed.link),
        token_seconds=token_seconds,
        slots=slots,
        rollout_cpu_seconds=job.samples * assumed.cpu_per_sample,
    )


def _token_seconds(job: Job, work: ModelWork, gpu: Gpu, context: float, assumed: Assumptions) -> float:
    read = work.touched_weights(job.slots) * job.bytes_per_weight + job.slots * context * job.cache_per_token
    by_memory = read / (job.engine_gpus * gpu.bandwidth * assumed.decode_use)
    by_flops = 2 * job.slots * work.passed_weights / (job.engine_gpus * gpu.flops * assumed.mfu)
    return max(by_memory, by_flops)


def describe(estimate: Estimate, assumed: Assumptions) -> str:
    """The estimate and all that it assumes, for people."""
    middle = median(estimate.response)
    return (
        f"Estimated, not measured: an engine runs {estimate.slots} requests at once, a response takes {middle:.3g} s "
        f"(median; {estimate.token_seconds * 1000:.3g} ms per token), a training step {estimate.train_seconds:.3g} s, "
        f"copying its weights {estimate.copy_seconds:.3g} s, sending {estimate.publish_seconds:.3g} s; the rollout "
        f"process {estimate.rollout_cpu_seconds:.3g} s of CPU per step.\n"
        f"Assumed: training reaches {assumed.mfu:.0%} of the GPU's FLOP/s (--mfu), decoding {assumed.decode_use:.0%} "
        f"of its memory's bandwidth (--decode-use), a sender {assumed.link / GB:g} GB/s to the engines "
        f"(--link-gbytes) and {assumed.copy / GB:g} GB/s to host memory, {assumed.cpu_per_sample * 1000:g} ms of CPU "
        "per sample; engines always run as many requests as their cache holds, and prompts cost them nothing.\n"
    )
