"""One run at a time saves into a directory: a second one is refused, and a dead one's lock is taken over.

# covers: C9
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints import save_lock as module
from miles_async.checkpoints.manifest import RunIdentity
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.checkpoints.save_lock import LockOwner, SaveLock, lock_problem, save_lock
from miles_async.checkpoints.start import checkpoint_problems
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.seams import Position
from tests.fakes.fake_sides import FakeRollout, FakeTrainer

RUN = Path("runs/other")
HOLDER = """
import sys, time
from pathlib import Path
from miles_async.checkpoints.save_lock import save_lock
from miles_async.errors import ConfigurationError
try:
    with save_lock(Path(sys.argv[1]), Path("runs/holder")):
        print("held", flush=True)
        sys.stdin.read()
except ConfigurationError as error:
    print("refused", error, flush=True)
"""


@contextmanager
def other_process(save: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the lock, and holds it until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(save)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_word(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().split(" ")[0].strip()


def leave_lock(save: Path, *, seconds_ago: float, **changes: object) -> LockOwner:
    """The lock of a process on another host."""
    owner = module._this_process(RUN)
    owner = msgspec.structs.replace(owner, **{"host": "gpu-17", "kernel": "another", "token": "theirs", **changes})
    save.mkdir(parents=True, exist_ok=True)
    path = save / "save_lock.json"
    written = path.with_suffix(".left")
    written.write_bytes(msgspec.json.encode(owner))
    os.utime(written, (time.time() - seconds_ago,) * 2)
    written.replace(path)  # whole at once, as a heart that beats reads it at any moment
    return owner


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_second_process_is_refused_at_once_with_owner_age_and_advice(tmp_path: Path) -> None:
    with other_process(tmp_path) as holder:
        assert first_word(holder) == "held"
        expected = (
            rf"--save {tmp_path}: a run saves there, process {holder.pid} on .*, --run-dir runs/holder, with a sign of "
            r"life \d s ago \(save_lock\.json\): end that run, or choose another --save"
        )
        with pytest.raises(ConfigurationError, match=expected), save_lock(tmp_path, RUN):
            pass
        [problem] = checkpoint_problems(save=tmp_path, load=None, overwrite=True, model={})  # --dry-run asks here
        assert f"process {holder.pid} on" in problem
        with other_process(tmp_path) as third:
            assert first_word(third) == "refused"
        holder.stdin.close()
        holder.wait(20)
    assert names(tmp_path) == []
    with save_lock(tmp_path, RUN) as lock:
        assert lock.taken_from is None


def test_a_killed_owner_of_this_machine_is_replaced_at_once_and_its_partial_removed(tmp_path: Path) -> None:
    with other_process(tmp_path) as holder:
        assert first_word(holder) == "held"
        (tmp_path / "iter_0000020.partial" / "trainer").mkdir(parents=True)
        (tmp_path / "iter_0000010").mkdir()
        holder.kill()
        holder.wait(20)
    with save_lock(tmp_path, RUN) as lock:
        assert lock.taken_from.pid == holder.pid
        assert names(tmp_path) == ["iter_0000010", "save_lock.json"]
    assert names(tmp_path) == ["iter_0000010"]


def test_an_owner_elsewhere_is_dead_two_minutes_after_its_last_sign_of_life(tmp_path: Path) -> None:
    leave_lock(tmp_path, seconds_ago=100)
    with pytest.raises(ConfigurationError, match=r"on gpu-17, .* 10\d s ago .*the lock is free 120 s after .*in \d+ s"):
        SaveLock(tmp_path, RUN)
    assert names(tmp_path) == ["save_lock.json"]
    theirs = leave_lock(tmp_path, seconds_ago=130)
    assert lock_problem(tmp_path) is None
    with save_lock(tmp_path, RUN) as lock:
        assert lock.taken_from == theirs


def test_another_process_with_the_pid_of_a_dead_owner_is_not_it(tmp_path: Path) -> None:
    mine = module._this_process(RUN)
    leave_lock(tmp_path, seconds_ago=0, kernel=mine.kernel, ticks=mine.ticks + 1)
    SaveLock(tmp_path, RUN).release()


def test_of_many_that_take_a_dead_ones_lock_one_gets_it(tmp_path: Path) -> None:
    leave_lock(tmp_path, seconds_ago=1000)
    start, taken = threading.Barrier(8), list[SaveLock]()

    def take() -> None:
        start.wait()
        try:
            taken.append(SaveLock(tmp_path, RUN))
        except ConfigurationError:
            pass

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [lock] = taken
    lock.check()
    lock.release()
    assert names(tmp_path) == []


def test_what_a_process_left_that_died_while_it_took_a_lock_holds_up_nobody(tmp_path: Path) -> None:
    leave_lock(tmp_path, seconds_ago=1000)
    (tmp_path / "save_lock.json").rename(tmp_path / "save_lock.taking")
    leave_lock(tmp_path, seconds_ago=1000)
    SaveLock(tmp_path, RUN).release()
    assert names(tmp_path) == []


def test_it_beats_and_says_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    lock = SaveLock(tmp_path, RUN)
    path = tmp_path / "save_lock.json"
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 10
    while path.stat().st_mtime < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lock_problem(tmp_path) is not None
    leave_lock(tmp_path, seconds_ago=0)
    lock._heart.join(10)
    assert "is of process" in capsys.readouterr().out
    lock.release()  # which leaves the other's
    assert names(tmp_path) == ["save_lock.json"]


async def test_a_run_whose_lock_was_lost_writes_nothing_more(tmp_path: Path) -> None:
    with save_lock(tmp_path, RUN) as lock:
        arguments, identity = CheckpointArguments(save=tmp_path), RunIdentity(run="mine", model={}, ranks={})
        checkpoints = RunCheckpoints(FakeTrainer([]), FakeRollout([]), arguments, identity, lock)
        await checkpoints.save(Position(step=5))
        leave_lock(tmp_path, seconds_ago=0)
        for step in (checkpoints.finish, lambda: checkpoints.save(Position(step=6))):
            with pytest.raises(
                CheckpointError, match=r"this run's lock .* is of process .* on gpu-17, .*end one of the"
            ):
                await step()
    assert names(tmp_path) == ["iter_0000005.partial", "save_lock.json"]  # the other's to remove, or to write


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigurationError, match=r"cannot write its lock, save_lock\.json: .*No space left"):
            SaveLock(tmp_path, RUN)
    SaveLock(tmp_path, RUN).release()  # as soon as there is room


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_is_released_however_the_run_ends(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), save_lock(tmp_path, RUN):
        raise error
    assert names(tmp_path) == []


def test_a_save_that_the_end_of_the_run_interrupts_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        for name in ("iter_0000005", "iter_0000010.partial"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "weights").write_bytes(b"w")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), save_lock(tmp_path, RUN):
        interrupted()
    assert names(tmp_path) == ["iter_0000005"]
