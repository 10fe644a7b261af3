"""The transports by name (``--weight-transport``): makes both halves of one, and says why it would not work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from miles_async.arguments.cluster import Device
from miles_async.arguments.weights import WeightsArguments
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError
from miles_async.runtime.hooks import load_instance
from miles_async.seams import EngineFleet, WeightSender, WeightSenders, WeightTransport
from miles_async.weights.staging_options import KEPT_VERSIONS, StagingOptions
from miles_async.weights.transports import disk, distributed, ipc, object_store
from miles_async.weights.transports.spec import DriverSide, RankSide, TransportSpec

TRANSPORTS: dict[str, TransportSpec[Any]] = {
    spec.name: spec for spec in (distributed.SPEC, disk.SPEC, object_store.SPEC, ipc.SPEC)
}


def find_transport(name: str) -> TransportSpec[Any]:
    """The transport called ``name``, or the one at ``module:attr``. Raises ConfigurationError."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if ":" not in name:
        raise ConfigurationError(
            f"--weight-transport {name}: expected {', '.join(TRANSPORTS)}, or module:attr naming a TransportSpec"
            + did_you_mean(name, TRANSPORTS)
        )
    return load_instance(name, TransportSpec, "--weight-transport")


def make_transport(
    arguments: WeightsArguments,
    trainer: WeightSenders,
    fleet: EngineFleet,
    device: Device,
    *,
    name: str = "weights",
    repair: bool = False,
) -> WeightTransport:
    """The driver's half.

    ``device``: "cpu" or "cuda". ``name``: names what it shares with engines; unique in a run. ``repair``: it may send
    during deliveries.
    """
    return find_transport(arguments.weight_transport).driver(
        DriverSide(
            sender=partial(trainer.sender, repair=repair),
            fleet=fleet,
            name=name,
            device=device,
            delta=arguments.weight_delta != "off",
        )
    )


def make_sender(
    arguments: WeightsArguments,
    device: Device,
    address: str,
    *,
    version_bytes: int | None = None,
    pinned: int = 1,
    ports: range | None = None,
    sender: int = 0,
    senders: int = 1,
) -> WeightSender:
    """The half of sending rank number ``sender``, in its process.

    ``address``: where engines reach this process, on one of ``ports``. ``version_bytes``: of all weights; None if they
    are not known. ``pinned``: most versions that are pinned at a time.
    """
    spec = find_transport(arguments.weight_transport)
    staging = StagingOptions(
        parent=arguments.weight_staging_dir,
        shared=spec.shared_files and arguments.weight_staging_dir is not None,
        version_bytes=None if version_bytes is None else version_bytes // senders,
        bucket_bytes=arguments.update_weight_buffer_size,
        sender=sender,
        senders=senders,
        keep=KEPT_VERSIONS + arguments.debug_publication_lag,
        pinned=pinned,
        quantization=arguments.rollout_quantization,
        digests=arguments.compares_digests or arguments.weight_delta != "off",
        delta=arguments.delta_encoding,
    )
    return spec.rank(
        RankSide(staging=staging, address=address, ports=ports, device=device, timeout_seconds=arguments.group_timeout)
    )


def count_senders(arguments: WeightsArguments, pipeline_stages: int) -> int:
    return pipeline_stages if find_transport(arguments.weight_transport).sender_per_stage else 1


def transport_problems(
    arguments: WeightsArguments, device: Device, *, external_engines: bool, several_nodes: bool = False
) -> Iterator[str]:
    """Why weights cannot reach the engines as asked.

    ``external_engines``: some engines were not started by us. ``several_nodes``: some have ranks on several nodes.
    """
    try:
        spec = find_transport(arguments.weight_transport)
    except ConfigurationError as error:
        yield str(error)
        return
    name = arguments.weight_transport
    if device not in spec.devices:
        yield (
            f"--weight-transport {name} works on {' and '.join(spec.devices)} only, and this run's device is {device}: "
            f"use {_those(lambda other: device in other.devices)}"
        )
    if arguments.weight_delta != "off" and not spec.delta:
        yield (
            f"--weight-delta {arguments.weight_delta} needs files at the engines: --weight-transport "
            f"{_those(lambda other: other.delta)}, not {name}"
        )
    if several_nodes and not spec.several_nodes:
        yield (
            f"engines on several nodes (--rollout-num-nodes-per-engine) with --weight-transport {name}, which reaches "
            f"only the first of them: use {_those(lambda other: other.several_nodes)}"
        )
    if several_nodes and arguments.weight_delta != "off":
        yield (
            f"engines on several nodes (--rollout-num-nodes-per-engine) with --weight-delta {arguments.weight_delta} "
            "is not implemented: leave it off"
        )
    if external_engines and not spec.external_engines:
        yield (
            f"external engines with --weight-transport {name}: nothing of ours runs on their hosts, to see to weights "
            f"there; use {_those(lambda other: other.external_engines)}"
        )


def _those(fit: Callable[[TransportSpec], bool]) -> str:
    """Names of the transports that ``fit``: "a, b or c"."""
    *names, last = [spec.name for spec in TRANSPORTS.values() if fit(spec)]
    return f"{', '.join(names)} or {last}" if names else last
