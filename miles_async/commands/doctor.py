"""``miles-async doctor``: check this machine, or every node of a cluster, and say how to fix each problem."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from miles_async import __version__
from miles_async.arguments.cluster import ClusterArguments, Device, parse_port_range
from miles_async.commands.parser import CommandParser
from miles_async.errors import EXIT_FAILED, ConfigurationError
from miles_async.machine.checks import Intent, device_found, machine_findings, model_findings
from miles_async.machine.finding import Finding, Verdict
from miles_async.machine.gpus import cudnn_findings, rank_libraries
from miles_async.machine.limits import connection_findings
from miles_async.machine.network import HUB, WANDB, service_findings
from miles_async.machine.sandbox import sandbox_findings
from miles_async.runtime.cluster.ray_address import VARIABLE, check_ray_address, with_ray_address

_EPILOG = (
    "Exit status: 0 if a run can work (there may be warnings), 1 if something is in its way, 2 if the command line is "
    "wrong or the cluster cannot be joined. A run makes the same checks before it starts."
)


def doctor(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Run ``miles-async doctor``; return the exit status. Raises ConfigurationError."""
    parser = CommandParser(
        prog="miles-async doctor",
        description="Check what runs need of this machine: versions, GPUs, shared memory, limits, disk, ports, clock, "
        "services outside, the sandbox for code. Every problem comes with the command that fixes it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--cluster", action="store_true", help="check every node of the Ray cluster, and their network")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=f"address of the Ray head (default: {VARIABLE})")
    parser.add_argument("--device", choices=("auto", *get_args(Device)), default="auto", help="device to check")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="run directory to check")
    parser.add_argument("--hf-checkpoint", type=Path, metavar="DIR", help="model directory to check")
    parser.add_argument("--port-range", metavar="LOW-HIGH", help="port range to check (default: any ports)")
    parsed = parser.parse_args(words)
    ports = None if parsed.port_range is None else parse_port_range(parsed.port_range)
    intent = Intent(device=parsed.device, ports=ports, directories={"--run-dir": parsed.run_dir})
    if parsed.ray_address and not parsed.cluster:
        raise ConfigurationError("--ray-address without --cluster: give --cluster, or leave it out")
    address = _address(parsed.ray_address) if parsed.cluster else None
    counts: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            counts[finding.verdict] += 1
            show(f"  {finding.verdict:8} {finding.check:14} {finding.found}\n")
            if finding.mend:
                show(f"  {'':8} {'':14} mend: {finding.mend}\n")

    show(f"miles-async {__version__} on {socket.gethostname()}\n")
    tell(_here(replace(intent, own_gpus=not parsed.cluster), parsed.hf_checkpoint))
    if address is not None:
        for node, findings in asyncio.run(_cluster(address, intent)).items():
            show(f"node {node}\n")
            tell(findings)
    show(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "\n")
    return EXIT_FAILED if counts["failure"] else 0


def _here(intent: Intent, model: Path | None) -> Iterator[Finding]:
    yield from machine_findings(intent)
    if intent.own_gpus and device_found(intent.device)[0] == "cuda":
        yield from cudnn_findings(rank_libraries())  # not before every run: it imports for half a minute
    yield from connection_findings()
    yield from sandbox_findings()
    for service in (HUB, WANDB):
        yield from service_findings(service)
    if model is not None:
        yield from model_findings(model)


def _address(given: str | None) -> str:
    """Find the cluster's address. Raises ConfigurationError if there is none, or nothing answers there."""
    address = with_ray_address(ClusterArguments(ray_address=given)).ray_address
    if address is None:
        raise ConfigurationError(f"--cluster without a cluster: give --ray-address, or set {VARIABLE}")
    check_ray_address(address)
    return address


async def _cluster(address: str, intent: Intent) -> Mapping[str, Sequence[Finding]]:
    """Findings by node."""
    from miles_async.machine.cluster import cluster_findings
    from miles_async.runtime.cluster.ray_cluster import ray_cluster
    from miles_async.runtime.environment import worker_environment

    environment = worker_environment(ClusterArguments().forward_env, cpu=True)
    async with ray_cluster(address, environment, None):
        return await cluster_findings(intent)
