"""The lock of ``--save``: one run at a time writes checkpoints there.

``save_lock.json`` is created with O_EXCL, which network file systems have, too, and its owner touches it every
``BEAT_SECONDS``. Ages are differences of times that the file system sets, so clocks of hosts need not agree. The
lock of an owner that is dead is replaced by a rename, under a second file of the same kind.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import structlog

from miles_async.checkpoints.files import sweep_leftovers
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.runtime.processes.run_process import find_process, start_ticks

LOCK_FILE = "save_lock.json"
BEAT_SECONDS = 10.0
DEAD_SECONDS = 120.0  # without a beat, of an owner elsewhere

log = structlog.get_logger(__name__)


class LockOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the lock."""

    host: str
    kernel: str  # its boot and namespace of processes: where pids mean the same
    pid: int
    ticks: int  # when the process started, in clock ticks since boot
    started: float  # seconds since 1970, for people
    run_dir: str
    token: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, since {since}, --run-dir {self.run_dir}"


class SaveLock:
    """A lock that this process holds. ``taken_from``: the dead owner whose lock it was, or None."""

    def __init__(self, save: Path, run_dir: Path) -> None:
        """Take the lock. Raises ConfigurationError if a living run has it."""
        self._path = save / LOCK_FILE
        self._owner = _this_process(run_dir)
        try:
            save.mkdir(parents=True, exist_ok=True)
            self.taken_from = self._take(save)
        except OSError as error:
            raise ConfigurationError(f"--save {save}: cannot write its lock, {LOCK_FILE}: {error}") from error
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lock of --save", daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Raise CheckpointError if the lock is another's, or gone."""
        owner = _read(self._path)
        if owner is None or owner.token != self._owner.token:
            now = "gone" if owner is None else f"of {owner}"
            raise CheckpointError(
                f"this run's lock {self._path} is {now}, so that another run may save there: nothing more is written; "
                "end one of the two, and resume the other from its newest checkpoint"
            )

    def release(self) -> None:
        """Remove the lock unless it is another's; idempotent."""
        self._over.set()
        self._heart.join()
        with suppress(OSError, CheckpointError):
            self.check()
            self._path.unlink()

    def _take(self, save: Path) -> LockOwner | None:
        if _create(self._path, self._owner):
            return None
        guard = self._path.with_suffix(".taking")
        if not _create(guard, self._owner):
            just_now = f"--save {save}: another run is taking its lock: end one of the two"
            try:
                problem = _problem(save, guard)
            except FileNotFoundError:
                problem = just_now
            if problem is not None:
                raise ConfigurationError(problem)
            guard.unlink(missing_ok=True)  # of a process that died between the next lines
            if not _create(guard, self._owner):
                raise ConfigurationError(just_now)
        try:  # no other process replaces the lock from here on
            try:
                problem = _problem(save, self._path)
            except FileNotFoundError:  # released meanwhile
                problem = None
            if problem is not None:
                raise ConfigurationError(problem)
            before = _read(self._path)
            os.replace(guard, self._path)
            return before
        finally:
            with suppress(OSError):
                owner = _read(guard)
                if owner is not None and owner.token == self._owner.token:
                    guard.unlink()

    def _beat(self) -> None:
        failing = False
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.check()
                os.utime(self._path)
                failing = False
            except CheckpointError as error:
                log.error(str(error))
                return
            except OSError as error:  # a network disk that comes back
                if not failing:
                    log.warning("the lock of --save cannot be touched", file=str(self._path), error=str(error))
                failing = True


@contextmanager
def save_lock(save: Path | None, run_dir: Path) -> Iterator[SaveLock | None]:
    """Hold the lock of ``save``, and remove what a killed run left half written there. Nothing without ``save``.

    Raises ConfigurationError if a living run has it.
    """
    if save is None:
        yield None
        return
    lock = SaveLock(save, run_dir)
    try:
        try:
            sweep_leftovers(save)
        except OSError as error:
            raise ConfigurationError(f"--save {save}: cannot remove what a killed run left there: {error}") from error
        yield lock
    finally:
        with suppress(OSError, CheckpointError):  # of a save that the end of the run has interrupted
            lock.check()
            sweep_leftovers(save)
        lock.release()


def lock_problem(save: Path) -> str | None:
    """Say which living run has the lock of ``save``; None if none has. Changes nothing. Raises OSError."""
    try:
        return _problem(save, save / LOCK_FILE)
    except FileNotFoundError:
        return None


def _problem(save: Path, path: Path) -> str | None:
    """See :func:`lock_problem`. Raises FileNotFoundError if there is no ``path``."""
    owner, touched = _read(path), path.stat().st_mtime
    with tempfile.TemporaryFile(dir=save) as file:  # made now, by the file system's clock
        age = os.fstat(file.fileno()).st_mtime - touched
    if owner is not None and owner.kernel == _kernel():
        if find_process(owner.pid, owner.ticks) is None:
            return None
        advice = "end that run, or choose another --save"
    elif age > DEAD_SECONDS:
        return None
    else:
        advice = (
            f"end that run, or choose another --save; if its machine is dead, the lock is free {DEAD_SECONDS:g} s "
            f"after its last sign of life, in {DEAD_SECONDS - age:.0f} s"
        )
    who = owner or "a process that has not written its name yet"
    return (
        f"--save {save}: a run saves there, {who}, with a sign of life {max(age, 0):.0f} s ago ({path.name}): {advice}"
    )


def _create(path: Path, owner: LockOwner) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(owner) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: without a name in it, it would be taken for a living run's
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> LockOwner | None:
    """None if there is no lock, or it names no owner. Raises OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LockOwner)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _this_process(run_dir: Path) -> LockOwner:
    pid = os.getpid()
    return LockOwner(
        host=socket.gethostname(),
        kernel=_kernel(),
        pid=pid,
        ticks=start_ticks(pid),
        started=psutil.Process(pid).create_time(),
        run_dir=str(run_dir),
        token=secrets.token_hex(8),
    )


def _kernel() -> str:
    """Name the boot of this kernel and this process's namespace of pids: hosts and containers may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
