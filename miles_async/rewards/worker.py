"""The process at the other end of ``workers.WorkerPool``: calls functions by name until its stdin ends.

A message is 4 bytes of length and JSON. For a request ``[modules, module, function, arguments]`` it answers with an
empty message when all modules are imported and the function starts, then with ``["result", result]``,
``["error", text]``, or ``["outage", text]`` for a ServiceUnavailableError.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from typing import BinaryIO

import msgspec

from miles_async.errors import ServiceUnavailableError
from miles_async.rewards.confinement import keep_memory_private
from miles_async.runtime.processes.dies_with_parent import die_with
from miles_async.runtime.texts import shortened

MEMORY_BYTES = 4 << 30  # of address space: an answer that explodes must not exhaust the machine


def main() -> None:
    """Serve the parent whose process id is the one argument."""
    die_with(int(sys.argv[1]))
    keep_memory_private()  # from programs it starts: keys in the environment, what tests expect
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))  # programs it starts have their own
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not get between the replies
    while request := _read(requests):
        _serve(request, replies)


def _serve(request: bytes, replies: BinaryIO) -> None:
    needs, module, name, arguments = msgspec.json.decode(request)
    try:
        for needed in needs:
            importlib.import_module(needed)
        function = getattr(importlib.import_module(module), name)
        _write(replies, b"")
        reply = ["result", function(*arguments)]
    except Exception as error:  # supervision point: any error is the reply
        reply = [
            "outage" if isinstance(error, ServiceUnavailableError) else "error",
            shortened(f"{type(error).__name__}: {error}"),
        ]
    _write(replies, msgspec.json.encode(reply))


def _read(stream: BinaryIO) -> bytes:
    """Read the next message; b"" at the end."""
    return stream.read(int.from_bytes(stream.read(4), "big"))


def _write(stream: BinaryIO, message: bytes) -> None:
    stream.write(len(message).to_bytes(4, "big") + message)
    stream.flush()


if __name__ == "__main__":
    main()
