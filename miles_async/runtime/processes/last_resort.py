"""End the driver when it cannot end by itself: a call into a dead Ray blocks for a minute, then aborts.

SIGTERM to a whole process group, as ``timeout``, scancel and systemd send it, also ends Ray's own processes. So a
thread receives signals directly, watches Ray, and ends the process after a grace period. SIGHUP, which a terminal sends
as it closes, is the same, unless it is ignored, as by nohup.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STARTING_SECONDS = 8.0  # grace after a signal while parts start
ORDERLY_SECONDS = 75.0  # grace later, to stop both sides and Ray and write the summary
GRACE_SECONDS = 5.0  # grace once Ray is dead
_POLL_SECONDS = 0.5


@contextmanager
def signals_interrupt(
    handler: Callable[[int, FrameType | None], object] = signal.default_int_handler,
) -> Iterator[None]:
    """Make SIGTERM and SIGHUP call ``handler``; by default they raise KeyboardInterrupt, as Ctrl-C does."""
    terminals = [output for output in (1, 2) if os.isatty(output)]  # a closed one is none any more

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _discard(terminals)
        handler(number, frame)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in ending}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class LastResort:
    """Signals interrupt as Ctrl-C does while the context is open; ``end`` is called where that is not enough.

    >>> with LastResort(end) as last_resort:
    ...     asyncio.run(main())  # calls last_resort.interrupts_this_task()

    ``end(interrupted, reason)`` is called in another thread and must not return: the main thread is stuck.
    ``interrupted``: a signal asked for the end. ``lost()``: why the run cannot continue, empty while it can.
    """

    def __init__(self, end: Callable[[bool, str], None], lost: Callable[[], str]) -> None:
        self._end = end
        self._lost = lost
        self.interrupted = False  # a signal asked for the end
        self._patience = STARTING_SECONDS
        self._over = threading.Event()
        self._task: asyncio.Task[object] | None = None
        self._thread = threading.Thread(target=self._watch, name="last resort", daemon=True)

    def __enter__(self) -> LastResort:
        self._heard, self._wakeup = socket.socketpair()
        self._heard.setblocking(False)
        self._wakeup.setblocking(False)
        # The interpreter's own handler, in C, writes to this descriptor; Python's wait until the main thread is back.
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._handlers = signals_interrupt(self._interrupt)
        self._handlers.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._handlers.__exit__(None, None, None)
        signal.set_wakeup_fd(self._old_wakeup)
        self._heard.close()
        self._wakeup.close()

    def all_is_up(self) -> None:
        """Allow the time of an orderly end from now on."""
        self._patience = ORDERLY_SECONDS

    def interrupts_this_task(self) -> None:
        """Make them cancel the current task from now on."""
        self._task = asyncio.current_task()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if self._task is None:
            raise KeyboardInterrupt
        if not self._task.done():  # else the run is over, and says so
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _watch(self) -> None:
        lost, deadline = "", float("inf")
        while not self._over.is_set():
            if _signalled(self._heard):
                self.interrupted = True
                # While Ray starts, a handler of its C++ core (absl's) may come before ours: it has set an alarm that
                # aborts this process in three seconds.
                signal.alarm(0)
                deadline = min(deadline, time.monotonic() + self._patience)
            if not lost and (lost := self._lost()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                self._end(self.interrupted, lost or f"the run did not end within {self._patience:g} s")
                return


def _signalled(heard: socket.socket) -> bool:
    """Wait a moment for a signal that asks for the end."""
    if not select.select([heard], [], [], _POLL_SECONDS)[0]:
        return False
    return any(number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for number in heard.recv(4096))


def _discard(outputs: Iterable[int]) -> None:
    """Drop what is still written to these: writing to a terminal that is closed fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)
    os.close(nowhere)
