"""Liveness of the Ray cluster that this process started."""

from __future__ import annotations

import psutil

from miles_async.runtime.processes.run_process import is_alive

NEEDED = ("gcs_server", "raylet")  # no call into Ray is answered without both


class OwnRay:
    """Watches the processes that ``ray.init`` starts as children of this one."""

    def __init__(self) -> None:
        self._seen: dict[str, psutil.Process] = {}
        self._lost = ""
        self._ending = False

    def lost(self) -> str:
        """Name the processes that ended without a shutdown of Ray; empty if none did."""
        if self._lost or self._ending:
            return self._lost
        if len(self._seen) < len(NEEDED):  # Ray is starting; looking through all processes is not for later
            named = {_name(child): child for child in psutil.Process().children()}
            self._seen |= {name: child for name, child in named.items() if name in NEEDED}
        dead = [f"{name} (process {process.pid})" for name, process in self._seen.items() if not is_alive(process)]
        if dead:
            self._lost = f"Ray has ended: {' and '.join(dead)}"
        return self._lost

    def ends(self) -> None:
        """Expect Ray to end from now on."""
        self._ending = not self.lost()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
