"""A Debian system in a folder, made by debootstrap, and commands in it: what an image is, without a registry.

Each command has mounts and process ids of its own (`unshare`), so that nothing is mounted on this machine, and nothing
runs on, however a command ends.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MACHINE = "/mnt/machine"  # where folders of this machine are seen
NEEDED = ("debootstrap", "unshare", "nsenter", "chroot", "mount")
_SHARED_MEMORY = "4g"  # --shm-size of docs/docker.md


@dataclass(frozen=True, slots=True)
class User:
    uid: int
    gid: int
    home: str


class DebianRoot:
    """A system below ``path``. Needs root."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def bootstrap(self, release: str, mirror: str, limit: float) -> None:
        """Install Debian's smallest system, and the names by which this machine reaches the network."""
        run(["debootstrap", "--variant=minbase", release, str(self.path), mirror], limit)
        for name in ("hosts", "resolv.conf"):
            (self.path / "etc" / name).write_bytes(Path("/etc", name).read_bytes())

    def user(self, name: str) -> User:
        """Look up a name or number as /etc/passwd has it."""
        for line in self.path.joinpath("etc/passwd").read_text().splitlines():
            found, _, uid, gid, _, home, _ = line.split(":")
            if name in (found, uid):
                return User(int(uid), int(gid), home)
        raise ValueError(f"expected user {name} in the image's /etc/passwd, found no such line")

    def command(
        self,
        words: Sequence[str],
        *,
        user: User,
        directory: str = "/",
        variables: Mapping[str, str],
        folders: Sequence[Path] = (),
    ) -> list[str]:
        """The command that runs ``words`` as the first process of the system, with these variables and no others.

        ``folders`` are files and folders of this machine, seen below MACHINE and not to be written to.
        """
        root = shlex.quote(str(self.path))
        mounts = [
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro sysfs {root}/sys",
            f"mount -t tmpfs -o size={_SHARED_MEMORY} shm {root}/dev/shm",
            f"mount -t devpts -o ptmxmode=666 devpts {root}/dev/pts",
        ]
        for folder in folders:
            target = Path(f"{self.path}{MACHINE}{folder}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir(exist_ok=True) if folder.is_dir() else target.touch()
            quoted = shlex.quote(str(target))
            mounts.append(f"mount --bind {shlex.quote(str(folder))} {quoted}; mount -o remount,bind,ro {quoted}")
        inside = self._inside(words, user, directory, variables)
        script = "\n".join(["set -e", *mounts, f"exec {shlex.join(inside)}"])
        return ["unshare", "--mount", "--pid", "--fork", "--propagation=private", "bash", "-c", script]

    def command_beside(
        self,
        process: subprocess.Popen[bytes],
        words: Sequence[str],
        *,
        user: User,
        directory: str,
        variables: Mapping[str, str],
    ) -> list[str]:
        """The command that runs ``words`` where ``process``, which is such a command, sees its own processes."""
        first, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        inside = self._inside(words, user, directory, variables)
        return ["nsenter", f"--target={first}", "--mount", "--pid", *inside]

    def _inside(self, words: Sequence[str], user: User, directory: str, variables: Mapping[str, str]) -> list[str]:
        change = ["chroot", f"--userspec={user.uid}:{user.gid}", str(self.path)]
        change += ["/usr/bin/env", "--ignore-environment", f"--chdir={directory}", f"HOME={user.home}"]
        return [*change, *(f"{name}={value}" for name, value in variables.items()), *words]


def run(command: Sequence[str], limit: float) -> None:
    """Run it and all that it starts, for ``limit`` seconds at most; output goes to where ours does.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took too long.
    """
    with started(command) as process:
        try:
            if code := process.wait(limit):
                raise subprocess.CalledProcessError(code, command)
        finally:
            end(process)


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs: the kernel ends a namespace of processes with its first one, which is in this session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
