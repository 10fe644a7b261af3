"""Durations of a run's parts by arithmetic: data sheets, config.json, and a handful of assumptions that are printed.

For use before anything was measured; measured durations replace them, part by part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from miles_async.simulation.distributions import Distribution, median
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
    """Assumptions beyond data sheets. Defaults are guesses to be replaced."""

    mfu: float = 0.35  # share of the FLOP/s that training reaches
    decode_use: float = 0.5  # share of the memory's bandwidth that decoding reaches
    link: float = 50 * GB  # bytes per second from one sender to the engines: a 400 Gb/s adapter
    copy: float = 20 * GB  # bytes per second from one GPU to host memory
    files: float = 2.3 * GB  # bytes per second of files: docs/benchmarks.md, publication, 500M to one receiver
    cpu_per_sample: float = 1e-3  # seconds of the rollout process; docs/benchmarks.md, answers of 8k tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run's durations, from which :func:`assumptions` are found."""

    train_seconds: float  # one rollout step
    sequence_tokens: float  # mean of a sequence, prompt included
    token_seconds: float  # between two tokens of a response
    context: float  # mean tokens in the cache per running request
    copy_seconds: float
    pause_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Passes of a model over the batch of one rollout step."""

    training: int  # forward and backward
    scoring: float  # forward alone: old policy, reference, values


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """The properties of a weight transport that set its durations."""

    name: str
    senders: int  # trainer ranks that send weights
    loads_files: bool  # engines load files while they are paused; else senders send meanwhile
    shares_files: bool  # the senders write these files where all engines see them; else files are brought to each node
    sent: float = 1.0  # share of the bytes that is written or brought; less with --weight-delta


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The flags that durations depend on."""

    samples: int  # per rollout step
    prompt_tokens: int
    trainer_gpus: int
    transport: Transport  # the run's
    recompute: bool  # full recomputation: one more forward pass
    passes: Passes
    engine_gpus: int  # of one engine
    slots: int  # requests that an engine runs at once, if its cache has room
    caches: int  # of an engine; with data-parallel attention several, each next to its attention weights
    cache_tokens: int | None  # that an engine has room for, in all of its caches; None: unknown
    bytes_per_weight: float  # of engines' weights, on average
    cache_per_token: int  # bytes of keys and values, on all GPUs that have some of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Seconds of a publication by one transport."""

    transport: Transport
    copy_seconds: float  # to host memory: the trainer is busy
    bring_seconds: float  # of files to where engines load them from, during training
    pause_seconds: float  # engines generate nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Durations of the parts, and their sources."""

    response: Distribution
    train_seconds: float
    publication: Publication
    token_seconds: float  # between two tokens of a response
    slots: int  # requests that an engine runs at once
    rollout_cpu_seconds: float  # of the rollout process, per rollout step


def estimate(
    job: Job, work: ModelWork, gpu: Gpu, response_tokens: Distribution, assumed: Assumptions = Assumptions()
) -> Estimate:
    """Estimate all parts.

    Training: 6 FLOPs per weight that a token passes through and per token (2 forward, 4 backward), and attention's;
    decoding: weights and cache read from memory once per token of all running requests, or the FLOPs if they take
    longer.
    """
    length, context = job.prompt_tokens + median(response_tokens), job.prompt_tokens + median(response_tokens) / 2
    slots = job.slots if job.cache_tokens is None else max(1, min(job.slots, int(job.cache_tokens / context)))
    token_seconds = _token_seconds(replace(job, slots=slots), work, gpu, context, assumed)
    return Estimate(
        response=response_tokens.scaled(token_seconds),
        train_seconds=_peak_train_seconds(job, work, gpu, length) / assumed.mfu,
        publication=publication(job.transport, work.weights * job.bytes_per_weight, assumed),
        token_seconds=token_seconds,
        slots=slots,
        rollout_cpu_seconds=job.samples * assumed.cpu_per_sample,
    )


def assumptions(job: Job, work: ModelWork, gpu: Gpu, seen: Measured) -> dict[str, float]:
    """The fields of Assumptions with which :func:`estimate` reproduces the measurements."""
    weights = work.weights * job.bytes_per_weight
    share = weights / job.transport.senders
    sending = {"files": weights} if job.transport.loads_files else {"link": share}
    peak_token_seconds = _bytes_per_token(job, work, seen.context) / (job.engine_gpus * gpu.bandwidth)
    return {
        "mfu": _peak_train_seconds(job, work, gpu, seen.sequence_tokens) / seen.train_seconds,
        "decode_use": peak_token_seconds / seen.token_seconds,
        "copy": share / seen.copy_seconds,
        **{name: size / seen.pause_seconds for name, size in sending.items()},
    }


def publication(transport: Transport, weights: float, assumed: Assumptions) -> Publication:
    """Estimate a publication of ``weights`` bytes. Senders work side by side, and so do engines."""
    share = weights / transport.senders
    bring, pause = 0.0, share / assumed.link
    if transport.loads_files:
        rate = assumed.files if transport.shares_files else assumed.link
        bring = share * transport.sent / rate
        pause = weights / assumed.files  # changes are spread over all files, so every one is loaded
    return Publication(transport=transport, copy_seconds=share / assumed.copy, bring_seconds=bring, pause_seconds=pause)


def _peak_train_seconds(job: Job, work: ModelWork, gpu: Gpu, length: float) -> float:
    """Seconds of a training step at the GPU's peak."""
    forwards = job.passes.training * (4 if job.recompute else 3) + job.passes.scoring
    return forwards * 2 * job.samples * work.sequence_flops(length) / (job.trainer_gpus * gpu.flops)


def _bytes_per_token(job: Job, work: ModelWork, context: float) -> float:
    """Bytes that an engine reads for the next token of all its requests."""
    weights = work.touched_weights(job.slots) + (job.caches - 1) * work.attention_weights
    return weights * job.bytes_per_weight + job.slots * context * job.cache_per_token


def _token_seconds(job: Job, work: ModelWork, gpu: Gpu, context: float, assumed: Assumptions) -> float:
    by_memory = _bytes_per_token(job, work, context) / (job.engine_gpus * gpu.bandwidth * assumed.decode_use)
    by_flops = 2 * job.slots * work.passed_weights / (job.engine_gpus * gpu.flops * assumed.mfu)
    return max(by_memory, by_flops)


def describe(
    estimate: Estimate,
    publications: Iterable[Publication],
    assumed: Assumptions,
    measured: Container[str] = (),
    origin: str = "",
) -> str:
    """The estimate and all that it assumes, for people. ``publications``: by the transports to compare; ``measured``:
    fields of ``assumed`` that ``origin`` measured.
    """
    middle = median(estimate.response)
    shares = {
        "mfu": f"training reaches {assumed.mfu:.0%} of the GPU's FLOP/s (--mfu)",
        "decode_use": f"decoding {assumed.decode_use:.0%} of its memory's bandwidth (--decode-use)",
        "link": f"a sender {assumed.link / GB:.3g} GB/s to the engines (--link-gbytes)",
        "copy": f"{assumed.copy / GB:.3g} GB/s to host memory",
        "files": f"files are written and loaded at {assumed.files / GB:.3g} GB/s by each sender and engine",
    }
    known = [text for name, text in shares.items() if name in measured]
    guessed = [text for name, text in shares.items() if name not in measured]
    return (
        f"Estimated, not measured: an engine runs {estimate.slots} requests at once, a response takes {middle:.3g} s "
        f"(median; {estimate.token_seconds * 1000:.3g} ms per token), a training step {estimate.train_seconds:.3g} s; "
        f"the rollout process {estimate.rollout_cpu_seconds:.3g} s of CPU per step.\n"
        + _publication_table(publications, estimate.publication.transport)
        + (f"Measured in {origin}: {', '.join(known)}.\n" if known else "")
        + f"Assumed: {', '.join(guessed)}{'; ' if guessed else ''}files are no slower on a shared file system; "
        f"of files {estimate.publication.transport.sent:.0%} are sent (--weight-delta); "
        f"{assumed.cpu_per_sample * 1000:g} ms of CPU per sample; engines always run as many requests as their cache "
        "holds, and prompts cost them nothing. Not counted: digests and deltas, which are computed during training.\n"
    )


def _publication_table(publications: Iterable[Publication], chosen: Transport) -> str:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("publication")
    for name in ("senders", "copy, s", "during training, s", "pause, s"):
        table.add_column(name, justify="right")
    for one in publications:
        name = one.transport.name + (" (chosen)" if one.transport.name == chosen.name else "")
        seconds = (one.copy_seconds, one.bring_seconds, one.pause_seconds)
        table.add_row(name, str(one.transport.senders), *(f"{each:.3g}" for each in seconds))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
