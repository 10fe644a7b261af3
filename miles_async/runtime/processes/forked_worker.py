"""An interpreter that is forked, for Ray: ``python forked_worker.py SOCKET TITLE script.py arguments...``.

Ray starts its workers with whatever command ``py_executable`` of a runtime environment names. This one has the fork
server behind SOCKET (``fork_server.py``) run the script with its own output, environment and working directory, and
stays until that process ends: each dies with the other. TITLE is the name of that process: in a fork, Ray cannot set
it. Without such a server this process becomes the interpreter itself.
Standard library only: it starts in milliseconds.
"""

import json
import os
import socket
import sys

_MAX_ANSWER = 1 << 16
IMPORTS_SECONDS = 40.0  # that imports may go on: Ray gives up a worker that has not registered after 60 s


def main(server: str, title: str, arguments: list[str]) -> None:
    """Run the arguments in a forked process, and end as it does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "title": title}
    connection.settimeout(IMPORTS_SECONDS)
    try:
        connection.connect(server)
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        answer = json.loads(connection.recv(_MAX_ANSWER) or b'{"refused": "it is ending"}')
        reason = answer.get("refused", "")
    except OSError as error:
        reason = str(error)
    if reason:
        print(f"it imports everything itself: the fork server at {server}: {reason}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *arguments])
    connection.settimeout(None)
    ended = connection.recv(_MAX_ANSWER)
    raise SystemExit(abs(json.loads(ended)["status"]) if ended else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
