"""A cluster on one machine: each "machine" is a set of Linux namespaces, with a Ray node.

    host ── (nothing: the host has no interface into the cluster, and none is left behind)

    switch   a network namespace with a bridge
    ├── m1   10.77.0.1   Ray's head            each machine has its own network, /dev/shm, /tmp, host name, process
    ├── m2   10.77.0.2   a Ray node            ids and time since its start; no route leads outwards, and its host name
    └── ...                                    resolves to 127.0.1.1, as on Debian

All namespaces are anonymous: they live as long as their first process, which dies with the test's, whatever way that
ends. So does everything in them. Files of machine mN are in ``directory/mN``, which it sees as its /tmp; only paths
named as ``shared`` are the same files everywhere, besides the sources and the environment, which are read-only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[2]
HEAD_PORT = 6379
_START_SECONDS = 120.0
_END_SECONDS = 10.0
_BIN = Path(sys.prefix) / "bin"
_FIRST_PROCESS = 'echo ready; trap "" TERM INT; while :; do sleep 1000 & wait; done'  # it reaps orphans, as bash does
_RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_prestart_worker_first_driver": "0"}
_PR_SET_PDEATHSIG = 1

# Python runs the lines of this file whenever it starts, in Ray's workers twice. (Clocks can't be set for one namespace,
# and a library that is preloaded would break waits until a time of day.)
_CLOCK = Path(sysconfig.get_path("purelib")) / "distutils-precedence.pth"
_WRONG_CLOCK = (
    '\nimport time; time.time = (lambda right: lambda: right() + {})(vars(time).setdefault("right_time", time.time))\n'
)


def why_impossible() -> str:
    """What this host lacks for machines; empty if nothing."""
    if os.geteuid() != 0:
        return "machines are network namespaces: needs root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"machines are network namespaces: needs the commands {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"machines are network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


needs_machines = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "-")
needs_tun = pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="slow wires need /dev/net/tun")


class Machine:
    """A machine that runs, or was killed."""

    def __init__(self, number: int, directory: Path, shared: Sequence[Path], clock_ahead: float) -> None:
        """``clock_ahead``: seconds by which its clock is wrong, for Python's ``time.time``."""
        self.name, self.address = f"m{number}", f"10.77.0.{number}"
        self.link = f"p{number}"  # its port at the switch
        self.tmp = directory / self.name  # its /tmp, as the host sees it
        self.tmp.mkdir(parents=True)
        (self.tmp / "home").mkdir()
        (self.tmp / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        (self.tmp / _CLOCK.name).write_text(_CLOCK.read_text() + _WRONG_CLOCK.format(clock_ahead))
        self._age = number * 1000  # seconds that it has been up, beyond the host
        self._shared = shared
        self._started: list[subprocess.Popen[bytes]] = []
        self.boot()

    def boot(self) -> None:
        """Start it, at first or after it was killed. Its files are still there."""
        unshare = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        since = ("--time", f"--monotonic={self._age}", f"--boottime={self._age}")
        setup = ["set -e", *self._mounts(self._shared), f"hostname {self.name}", "ip link set lo up", _FIRST_PROCESS]
        self._namespaces = _Namespaces([*unshare, *since, "bash", "-c", "\n".join(setup)])

    @property
    def pid(self) -> int:
        """Id of its first process, as the host sees it."""
        return self._namespaces.pid

    def has(self, pid: int) -> bool:
        """True if a process, by its id on the host, runs in this machine."""
        own, network = (Path(f"/proc/{each}/ns/net") for each in (self.pid, pid))
        return own.exists() and own.readlink() == network.readlink()

    def _mounts(self, shared: Sequence[Path]) -> Iterator[str]:
        for path, options in [*((path, "rw") for path in shared), *((path, "ro") for path in (ROOT, Path(sys.prefix)))]:
            target = path
            if path.is_relative_to("/tmp"):  # which becomes the machine's own
                target = self.tmp / path.relative_to("/tmp")
                yield f"mkdir -p {target}"
            yield f"mount --bind {path} {target} && mount -o remount,{options},bind {target}"
        yield "mount -t tmpfs -o size=3g none /dev/shm"
        yield f"mount --bind {self.tmp}/hosts /etc/hosts"
        yield f"mount --bind {self.tmp}/{_CLOCK.name} {_CLOCK}"
        yield f"mount --rbind {self.tmp} /tmp"

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The command that runs ``words`` in this machine, in the sources' directory."""
        enter = ("nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--time")
        unset = [f"--unset={name}" for name in os.environ if name.startswith("RAY_") or name.lower().endswith("_proxy")]
        values = {"HOME": "/tmp/home", "PYTHONPATH": str(ROOT), "PATH": f"{_BIN}:{os.environ['PATH']}", **(env or {})}
        assign = [f"{name}={value}" for name, value in values.items()]
        return (*enter, "env", f"--chdir={ROOT}", *unset, "--unset=TMPDIR", *assign, *words)

    def seen_from_host(self, path: str) -> Path:
        """Where the host has a file of this machine's /tmp."""
        return self.tmp / Path(path).relative_to("/tmp")

    def start(self, *words: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start ``words`` in this machine, until they end or it does."""
        with log.open("w") as output:
            command = self.command(*words, env=env)
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self._started.append(process)

    def kill(self) -> None:
        """Pull the plug: every process of the machine at once."""
        self._namespaces.end()
        while self._started:
            self._started.pop().wait(_END_SECONDS)


def on_second_network(machine: Machine) -> str:
    """The machine's address on the second network, of which Ray knows nothing."""
    return machine.address.replace("10.77.", "10.78.")


class Machines:
    """The machines of a cluster, ``m1`` (Ray's head) first."""

    def __init__(self, directory: Path, count: int, shared: Sequence[Path], clocks_ahead: Mapping[int, float]) -> None:
        self._directory = directory
        self._token = uuid.uuid4().hex
        self._switch = _Namespaces(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", _FIRST_PROCESS]
        )
        self._wires: list[subprocess.Popen[bytes]] = []
        self._on_switch("ip", "link", "add", "br0", "type", "bridge")
        self._on_switch("ip", "link", "set", "br0", "up")
        self.all = [
            Machine(position + 1, directory, shared, clocks_ahead.get(position, 0.0)) for position in range(count)
        ]
        for machine in self.all:
            self._plug_in(machine)

    def __getitem__(self, index: int) -> Machine:
        return self.all[index]

    @property
    def ray_address(self) -> str:
        return f"{self.all[0].address}:{HEAD_PORT}"

    def _plug_in(self, machine: Machine) -> None:
        self._connect(machine, machine.link, "eth0", machine.address)

    def add_second_network(self) -> None:
        """Give every machine an interface eth1, with the address that :func:`on_second_network` says."""
        for machine in self.all:
            self._connect(machine, f"second{machine.link}", "eth1", on_second_network(machine))

    def _connect(self, machine: Machine, link: str, interface: str, address: str) -> None:
        into = ("peer", "name", interface, "netns", str(machine.pid))
        self._on_switch("ip", "link", "add", link, "type", "veth", *into)
        self._set_up(machine, link, interface, address)

    def _set_up(self, machine: Machine, link: str, interface: str, address: str) -> None:
        self._on_switch("ip", "link", "set", link, "master", "br0", "up")
        for words in (("addr", "add", f"{address}/24", "dev", interface), ("link", "set", interface, "up")):
            subprocess.run(machine.command("ip", *words), check=True)

    def cut(self, machine: Machine) -> None:
        """Pull the machine's network cable."""
        self._on_switch("ip", "link", "set", machine.link, "down")

    def reconnect(self, machine: Machine) -> None:
        self._on_switch("ip", "link", "set", machine.link, "up")

    def slow_down(self, machine: Machine, *, delay: float, loss: float = 0.0) -> None:
        """Replace the machine's cable by a slow one, before anything is connected. In each direction a frame takes
        ``delay`` seconds, and the share ``loss`` of them is lost.
        """
        self._on_switch("ip", "link", "delete", machine.link)
        enter = ("nsenter", f"--target={self._switch.pid}", "--net", "--pid")  # it ends with the switch
        words = (sys.executable, "-m", "tests.cluster.slow_wire", machine.link, "far", str(delay), str(loss))
        wire = subprocess.Popen([*enter, *words], cwd=ROOT, stdout=subprocess.PIPE)
        self._wires.append(wire)
        assert wire.stdout is not None
        assert wire.stdout.readline() == b"ready\n"
        self._on_switch("ip", "link", "set", "far", "netns", str(machine.pid), "name", "eth0")
        self._set_up(machine, machine.link, "eth0", machine.address)

    def limit(self, machine: Machine, megabits: int) -> None:
        """Limit the machine's link to that many megabits per second, in each direction."""
        for place in (self._on_switch, lambda *words: subprocess.run(machine.command(*words), check=True)):
            device = machine.link if place == self._on_switch else "eth0"
            queue = ("tbf", "rate", f"{megabits}mbit", "burst", "1mb", "latency", "50ms")
            place("tc", "qdisc", "replace", "dev", device, "root", *queue)

    def bytes_from(self, machine: Machine) -> int:
        """Count the bytes that the machine has sent so far."""
        found = self._on_switch("ip", "-json", "-stats", "link", "show", "dev", machine.link)
        return int(json.loads(found)[0]["stats64"]["rx"]["bytes"])

    def start_ray(self, labels: Mapping[int, str] | None = None) -> None:
        """Start a Ray node on every machine; they ask for a token, as they do by default since Ray 2.60.

        ``labels``: of machines by their position, each ``name=value``.
        """
        for machine in self.all:
            (machine.tmp / "home" / ".ray").mkdir()
            (machine.tmp / "home" / ".ray" / "auth_token").write_text(self._token)
        self._ray_nodes([0], labels or {})
        self._ray_nodes(range(1, len(self.all)), labels or {})

    def bring_back(self, machine: Machine, label: str) -> None:
        """Start a machine that was killed, and its Ray node."""
        machine.boot()
        self._plug_in(machine)
        position = self.all.index(machine)
        self._ray_nodes([position], {position: label})

    def _ray_nodes(self, positions: Sequence[int], labels: Mapping[int, str]) -> None:
        logs = []
        for position in positions:
            machine = self.all[position]
            role = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
            if position:
                role = [f"--address={self.ray_address}"]
            words = ["--block", f"--node-ip-address={machine.address}", "--num-cpus=1", "--disable-usage-stats"]
            words += ["--object-store-memory=100000000"]
            words += [f"--labels={labels[position]}"] if position in labels else []
            log = self._directory / f"{machine.name}.ray.log"
            machine.start("ray", "start", *role, *words, log=log, env=_RAY_ENVIRONMENT)
            logs.append(log)
        for log in logs:
            _wait_for_line(log, "Ray runtime started")

    def _on_switch(self, *words: str) -> bytes:
        command = ["nsenter", f"--target={self._switch.pid}", "--net", *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    def stop(self) -> None:
        """End all machines, and with them everything that runs or is mounted in them."""
        for machine in self.all:  # one that does not end must not keep the others
            with suppress(subprocess.TimeoutExpired):
                machine.kill()
        self._switch.end()
        for wire in self._wires:
            wire.communicate(timeout=_END_SECONDS)


@contextmanager
def machines(
    directory: Path, count: int, shared: Sequence[Path] = (), clocks_ahead: Mapping[int, float] = MappingProxyType({})
) -> Iterator[Machines]:
    """Machines without Ray; nothing of them is left afterwards. ``clocks_ahead``: seconds by which the clocks of some
    are wrong, by position.
    """
    cluster = Machines(directory, count, shared, clocks_ahead)
    try:
        yield cluster
    finally:
        cluster.stop()


class _Namespaces:
    """Namespaces that ``command`` makes, which ends by saying "ready" in them. They end with this process."""

    def __init__(self, command: Sequence[str]) -> None:
        libc = ctypes.CDLL(None)
        ours = os.getpid()

        def die_with_us() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != ours:
                os.kill(os.getpid(), signal.SIGKILL)

        self._starter = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=die_with_us, start_new_session=True
        )
        assert self._starter.stdout is not None
        if (told := self._starter.stdout.readline()) != b"ready\n":
            self._starter.kill()
            raise AssertionError(f"namespaces did not start: {command}: {told!r}")
        children = Path(f"/proc/{self._starter.pid}/task/{self._starter.pid}/children").read_text()
        self.pid = int(children.split()[0])  # the first process in them

    def end(self) -> None:
        """End every process in them, and wait for that. Idempotent."""
        if self._starter.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._starter.wait(_END_SECONDS)
        assert self._starter.stdout is not None
        self._starter.stdout.close()


def _wait_for_line(log: Path, words: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while words not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
