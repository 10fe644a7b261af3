"""Import what several fork servers have in common, once, then fork the servers, which import the rest.

    python -m miles_async.runtime.processes.common_imports DESCRIPTOR MODULE... PADDING

DESCRIPTOR is a connection on which a message comes for each server (:class:`ServerRequest`), with a listening socket
and a descriptor for its output. When the connection closes there are no more; this process stays until its servers
have ended. Each server dies with it, and it with its parent. ``fork_server_process.py`` has the other side.

A module that cannot be imported is left to the servers that need it: their logs say what is wrong. A server whose
environment differs from this process's in a variable that imports may have read is a new interpreter.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import setproctitle

from miles_async.runtime.processes import fork_server


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One server to fork."""

    title: str  # name of its process
    modules: tuple[str, ...]
    late: str  # pattern of variables that neither its imports nor earlier ones read
    children_late: str  # pattern of the variables that may differ in its children
    environment: dict[str, str]


def main() -> None:
    descriptor, *modules, _ = sys.argv[1:]
    environment = dict(os.environ)
    connection = socket.socket(fileno=int(descriptor))
    setproctitle.getproctitle()  # it takes note of where arguments are, once
    for module in modules:
        with suppress(Exception):  # supervision point: the servers import it again, and say why they cannot
            fork_server.import_modules([module])
    parent = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, fork_server.MAX_REQUEST, 2)
        if not message:
            break
        if os.fork() == 0:
            connection.close()
            _become_server(msgspec.json.decode(message, type=ServerRequest), descriptors, parent, environment)
            return
        for received in descriptors:
            os.close(received)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _become_server(
    request: ServerRequest, descriptors: Sequence[int], parent: int, environment: Mapping[str, str]
) -> None:
    """Serve; returns in children of the server that have run."""
    listener, output = descriptors
    reason = fork_server.refusal(request.environment, environment, request.late)
    fork_server.become_leader(parent, [output, output])
    os.close(output)
    if reason:
        print(f"it imports everything itself: {reason}", flush=True)
        os.set_inheritable(listener, True)
        command = [sys.executable, *fork_server.command(listener, request.children_late, request.modules)]
        os.execve(sys.executable, command, request.environment | {fork_server.TITLE_VARIABLE: "1"})
    set_by_imports = dict(os.environ.items() - environment.items())
    fork_server.take_environment(request.environment | set_by_imports)
    setproctitle.setproctitle(" ".join([request.title, *request.modules]))
    fork_server.serve(socket.socket(fileno=listener), request.children_late, request.modules, request.environment)


if __name__ == "__main__":
    main()
