"""Run a command and end all processes that it leaves behind: ``python process_tree.py PARENT_PID command ...``.

Ends with the command's exit status (128 + N for signal N), after it has ended every process that the command started
and left, in whatever session: as a subreaper (PR_SET_CHILD_SUBREAPER) it becomes the parent of the orphans among them.
On SIGTERM, or when its parent dies, it ends the command first. It uses the standard library only, to start fast: each
trajectory starts one.
"""

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_END_SECONDS = 5.0  # a process in an uninterruptible system call may outlive its SIGKILL


def main(arguments: list[str]) -> None:
    """Run the command to its end, then end the processes that it left."""
    parent, command = int(arguments[0]), arguments[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _tie(parent, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        status = _wait(_start(command))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()
    sys.exit(status if status >= 0 else 128 - status)


def _tie(parent: int, to: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, to)
    if os.getppid() != parent:  # it died before the line above took effect
        raise SystemExit("parent process is gone")


def _start(command: list[str]) -> int:
    ourselves = os.getpid()
    if child := os.fork():
        return child
    try:
        _tie(ourselves, signal.SIGKILL)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _wait(command: int) -> int:
    """The command's exit status, minus its signal; orphans that end meanwhile are reaped."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == command:
            return os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    """Kill children until none is left; children of a killed child become ours."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:
                continue  # it ended meanwhile, or belongs to another user
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])  # the name before may hold anything
        except OSError:
            continue
        if parent == os.getpid():
            found.append(int(entry))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
