"""``miles-async watch``: a live page of runs, on this machine's loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.runtime.network.addresses import LOOPBACK
from miles_async.runtime.network.keys import Secret, fresh_key
from miles_async.watch.run import open_runs

KEY_VARIABLE = "MILES_ASYNC_WATCH_KEY"
WRITE_KEY_VARIABLE = "MILES_ASYNC_WATCH_WRITE_KEY"
PORT = 8741
DEFAULT = Path("runs")


def watch(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Serve until Ctrl-C; the exit code. Raises ConfigurationError: no run is there, or the port is taken."""
    parser = CommandParser(
        prog="miles-async watch",
        description="Show runs in a browser: curves, ages, samples, attempts, engines, flags and logs. The page "
        "is updated during a run. It reads the run directories; only with --write it asks processes of a run.",
    )
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help=f"run directories, or directories of some ({DEFAULT})",
    )
    parser.add_argument("--port", type=int, help=f"port on {LOOPBACK} (default: {PORT}, or a free one if it is taken)")
    parser.add_argument(
        "--write",
        action="store_true",
        help="print a second address, with a key that also changes settings of live runs, as `miles-async set` does",
    )
    parsed = parser.parse_args(words)
    runs = open_runs(parsed.directories or [DEFAULT])
    key, write_key = _key(KEY_VARIABLE), _key(WRITE_KEY_VARIABLE) if parsed.write else None
    if write_key is not None and write_key.reveal() == key.reveal():
        raise ConfigurationError(f"{KEY_VARIABLE} and {WRITE_KEY_VARIABLE}: expected two keys, found the same")
    with _bound(parsed.port) as door:
        port = door.getsockname()[1]
        show("".join(f"{run.directory}\n" for run in runs))
        show(f"open http://{LOOPBACK}:{port}/#key={key.reveal()}\n")
        if write_key is not None:
            show(f"to change settings, too: http://{LOOPBACK}:{port}/#key={write_key.reveal()}\n")
        show(f"from another machine, first: ssh -N -L {port}:{LOOPBACK}:{port} {socket.gethostname()}\n")
        from miles_async.watch.server import make_server

        make_server(runs, key, write_key).run(sockets=[door])
    return 0


def _key(variable: str) -> Secret:
    return Secret(given) if (given := os.environ.get(variable)) else fresh_key()


def _bound(port: int | None) -> socket.socket:
    """A socket on loopback; with ``port`` None the usual port, or any free one."""
    for number in (PORT, 0) if port is None else (port,):
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((LOOPBACK, number))
            door.listen(64)
            return door
        except (OSError, OverflowError) as error:
            door.close()
            reason = error
    raise ConfigurationError(f"--port {port}: cannot listen at {LOOPBACK}: {reason}")
