"""Which transport a run uses (``--weight-transport``)."""

from __future__ import annotations

from miles_async.arguments.cluster import Device
from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import ConfigurationError
from miles_async.seams import EngineFleet, WeightSenders, WeightTransport
from miles_async.weights.transports.disk import DiskTransport
from miles_async.weights.transports.distributed import DistributedTransport
from miles_async.weights.transports.host_copies import HostCopyTransport
from miles_async.weights.transports.ipc import IpcTransport
from miles_async.weights.transports.repair_senders import RepairSenders


def choose_transport(
    arguments: WeightsArguments,
    trainer: WeightSenders,
    fleet: EngineFleet,
    device: Device,
    *,
    name: str = "weights",
    repair: bool = False,
) -> WeightTransport:
    """The driver's half. ``device``: "cpu" or "cuda"; ``name``: of what is sent to, unique in a run; ``repair``: it
    sends beside deliveries.
    """
    if repair:
        trainer = RepairSenders(trainer)
    keep = arguments.weight_delta != "off"
    flush_cache = arguments.pause_generation_mode != "in_place"  # there SGLang refuses to
    match arguments.weight_transport:
        case "distributed":
            backend = group_backend(device)
            return DistributedTransport(trainer, fleet, backend=backend, flush_cache=flush_cache, name=name)
        case "disk" if not keep:
            return DiskTransport(fleet, flush_cache=flush_cache)
        case "disk" | "object_store" as kind:
            return HostCopyTransport(
                trainer, fleet, object_store=kind == "object_store", keep=keep, flush_cache=flush_cache
            )
        case "ipc":
            return IpcTransport(trainer, fleet, flush_cache=flush_cache, name=name)
        case other:
            raise AssertionError(other)


def check_device(arguments: WeightsArguments, device: Device) -> None:
    """Raises ConfigurationError if the transport needs another device."""
    if arguments.weight_transport == "ipc" and device != "cuda":
        raise ConfigurationError(
            f"--weight-transport ipc shares the memory of a GPU with engines on it, and this run's device is {device}: "
            "use distributed, disk or object_store"
        )


def group_backend(device: Device) -> str:
    """Of the process group of ``distributed``, at both ends."""
    return "nccl" if device == "cuda" else "gloo"
