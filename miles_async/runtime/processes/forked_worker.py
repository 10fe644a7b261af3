"""An interpreter that is forked, for Ray: ``python forked_worker.py SOCKET TITLE script.py arguments...``.

Ray starts its workers with whatever command ``py_executable`` of a runtime environment names. This one has the fork
server behind SOCKET (``fork_server.py``) run the script with its own output, environment and working directory, and
stays until that process ends: each dies with the other. TITLE is the name of that process: in a fork, Ray cannot set
it. Without such a server this process becomes the interpreter itself. ``forking.py`` makes the same requests.
Standard library only: it starts in milliseconds.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence

_MAX_ANSWER = 1 << 16
IMPORTS_SECONDS = 40.0  # deadline of the server's imports: Ray gives up a worker that has not registered after 60 s


class RefusedError(OSError):
    """The server does not fork this process."""


def main(server: str, title: str, arguments: list[str]) -> None:
    """Run the arguments in a forked process, and end as it does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(IMPORTS_SECONDS)
    try:
        request(connection, server, arguments, os.environ, title, (1, 2))
        receive_pid(connection)
    except OSError as error:
        print(f"it imports everything itself: the fork server at {server}: {error}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *arguments])
    connection.settimeout(None)
    status = receive_status(connection)
    raise SystemExit(1 if status is None else abs(status))


def request(
    connection: socket.socket,
    server: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    title: str,
    output: Sequence[int],
) -> None:
    """Ask the server to fork ``python *arguments``. ``output``: descriptors for stdout and stderr. Raises OSError."""
    connection.connect(server)
    process = {"arguments": [*arguments], "environment": {**environment}, "directory": os.getcwd(), "title": title}
    socket.send_fds(connection, [json.dumps(process).encode()], output)


def receive_pid(connection: socket.socket) -> int:
    """Return the pid of the new process. Raises OSError: RefusedError if the server refuses or ends."""
    answer = json.loads(connection.recv(_MAX_ANSWER) or b'{"refused": "it is ending"}')
    if "refused" in answer:
        raise RefusedError(f"it refuses: {answer['refused']}")
    return int(answer["pid"])


def receive_status(connection: socket.socket) -> int | None:
    """Return the exit status of the process, negative for a signal; None if it died with its server."""
    answer = connection.recv(_MAX_ANSWER)
    return int(json.loads(answer)["status"]) if answer else None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
