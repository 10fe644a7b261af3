"""``TransportSpec``: what a weight transport declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from miles_async.arguments.cluster import Device
from miles_async.seams import EngineFleet, SenderHandle, WeightSender, WeightTransport
from miles_async.weights.staging_options import StagingOptions

Half = TypeVar("Half", bound=WeightSender)
"""Protocol of the rank half, as the driver half calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverSide(Generic[Half]):
    """Parts for a driver half."""

    sender: Callable[[int], SenderHandle[Half]]  # index of a sending rank → its half
    fleet: EngineFleet
    name: str  # names things shared with engines, such as process groups; unique in a run
    device: Device = "cpu"  # of the run
    delta: bool = False  # --weight-delta is on: engines that hold the version before are sent what changed


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSide:
    """Parts for a rank half, in the process of a sending rank."""

    staging: StagingOptions
    address: str  # where engines reach this process
    ports: range | None = None  # to listen on; None: any
    device: Device
    timeout_seconds: float  # for members of a process group to wait for each other


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSpec(Generic[Half]):
    """A transport: its two halves, and what it can do.

    A transport of your own is such an object, named by ``--weight-transport my_module:SPEC``:

    >>> SPEC = TransportSpec(name="rsync", driver=RsyncTransport, rank=make_sender, external_engines=False)
    """

    name: str
    driver: Callable[[DriverSide[Half]], WeightTransport]
    rank: Callable[[RankSide], Half]  # imports torch when it is called, not before: the driver knows this object too
    devices: tuple[Device, ...] = ("cpu", "cuda")  # on which it works
    sender_per_stage: bool = False  # every pipeline stage sends a share; else rank 0 sends all
    shared_files: bool = False  # engines read the staged files themselves
    delta: bool = False  # can send what changed (--weight-delta)
    several_nodes: bool = False  # reaches all ranks of an engine on several nodes
    external_engines: bool = False  # reaches engines on whose hosts nothing of ours runs (--rollout-external)
