"""Limits of the system: shared memory, disks, open files, connections, processes, locked memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_async.arguments.cluster import Device
from miles_async.arguments.surroundings import nearest_existing
from miles_async.machine.finding import Finding, Verdict, gib
from miles_async.runtime.files.scratch import network_file_system
from miles_async.runtime.network.open_files import connection_limits

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 2 << 30  # Ray's object store of a run has 1 GiB; NCCL, CUDA IPC and staged weights come on top
FEWEST_BYTES, FEW_BYTES = 1 << 30, 10 << 30  # of a disk: for logs, ledger and temporary files; for a comfortable run
FEW_PROCESSES = 4096  # threads count; Ray, torch and SGLang start some hundreds each
REQUESTS = 4096  # in flight at once; a run checks with its own number
_PIDS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))
_INFINIBAND = Path("/sys/class/infiniband")


def shared_memory_findings(device: Device, place: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check the size of /dev/shm, which containers make 64 MiB. Without it Ray uses disks, and NCCL fails."""
    try:
        status = os.statvfs(place)
    except OSError as error:
        found, free = f"{place}: {error.strerror}", 0
    else:
        free = status.f_frsize * status.f_bavail
        found = f"{place} has {gib(free)} free of {gib(status.f_frsize * status.f_blocks)}"
    if free >= SHARED_BYTES:
        yield Finding(check="shared memory", verdict="ok", found=found)
        return
    yield Finding(
        check="shared memory",
        verdict="failure" if device == "cuda" else "warning",
        found=f"{found}, expected {gib(SHARED_BYTES)} or more",
        mend=f"mount -o remount,size=50% {place}; in a container: docker run --shm-size=16g",
    )


def disk_findings(directories: Mapping[str, Path]) -> Iterator[Finding]:
    """Check free bytes and inodes. ``directories``: by purpose; they may not exist."""
    for name, directory in directories.items():
        place = nearest_existing(directory)
        status = os.statvfs(place)
        free = status.f_frsize * status.f_bavail
        found = f"{name}: {place} has {gib(free)} free"
        if status.f_files and not status.f_favail:  # some file systems count none
            found = f"{name}: {place} has no inode left for another file"
            yield Finding(check="disk", verdict="failure", found=found, mend=f"du --inodes -xd1 {place} | sort -n")
        elif free < FEW_BYTES:
            verdict: Verdict = "failure" if free < FEWEST_BYTES else "warning"
            yield Finding(check="disk", verdict=verdict, found=found, mend=f"du -xhd1 {place} | sort -h")
        elif name == "TMPDIR" and (kind := network_file_system(place)) is not None:
            found = f"TMPDIR: {place} is a network disk ({kind}), where no large temporary files go"
            yield Finding(check="disk", verdict="warning", found=found, mend="export TMPDIR=/a/local/disk")
        else:
            yield Finding(check="disk", verdict="ok", found=found)


def home_findings() -> Iterator[Finding]:
    """Check that HOME can be written to, where Ray keeps its token and packages their caches."""
    home = Path(os.environ.get("HOME") or Path.home())
    place = nearest_existing(home)
    if place.is_dir() and os.access(place, os.W_OK):
        yield Finding(check="home", verdict="ok", found=f"HOME={home}")
        return
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    has_token = named or os.environ.get("RAY_AUTH_MODE") == "disabled" or (home / ".ray" / "auth_token").is_file()
    lost = "packages keep caches there" if has_token else "Ray keeps its token there"
    yield Finding(
        check="home",
        verdict="warning" if has_token else "failure",
        found=f"HOME={home} cannot be written to, and {lost}",
        mend="export HOME=/a/directory/of/yours",
    )


def connection_findings() -> Iterator[Finding]:
    """Check open files and ports for a large run; a run with other numbers is checked with its own."""
    limits = connection_limits(REQUESTS)
    for limit in limits:
        yield Finding(
            check="connections",
            verdict="warning",
            found=f"{REQUESTS} requests at once would need {limit}",
            mend="ulimit -Hn 65536 (limits.conf, docker run --ulimit nofile=65536:65536); "
            "sysctl net.ipv4.ip_local_port_range='15000 60999'",
        )
    if not limits:
        yield Finding(
            check="connections", verdict="ok", found=f"enough files and ports for {REQUESTS} requests at once"
        )


def process_findings(groups: tuple[Path, ...] = _PIDS) -> Iterator[Finding]:
    """Check how many processes and threads the user and the container may have."""
    limits = []
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and hard != resource.RLIM_INFINITY:  # it does not bind root
        limits.append((hard, "the user (ulimit -Hu)", "ulimit -Hu 65536 (limits.conf)"))
    for path in groups:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append((int(text), f"this container ({path})", "docker run --pids-limit=-1"))
    few = [limit for limit in limits if limit[0] < FEW_PROCESSES]
    for most, owner, mend in few:
        found = f"{owner} may have {most} processes and threads, expected {FEW_PROCESSES} or more"
        yield Finding(check="processes", verdict="warning", found=found, mend=mend)
    if not few:
        yield Finding(check="processes", verdict="ok", found=f"{min(limits)[0]} may run" if limits else "no limit")


def locked_memory_findings(infiniband: Path = _INFINIBAND) -> Iterator[Finding]:
    """Check that RDMA can register memory, on machines that have such cards."""
    if not (infiniband.is_dir() and any(infiniband.iterdir())):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY:
        yield Finding(check="locked memory", verdict="ok", found="no limit")
    else:
        yield Finding(
            check="locked memory",
            verdict="warning",
            found=f"processes may lock {gib(hard)}; NCCL over InfiniBand registers more, or falls back to sockets",
            mend="ulimit -l unlimited (limits.conf, docker run --ulimit memlock=-1)",
        )
