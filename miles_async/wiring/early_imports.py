"""A run's first step: import the modules that most of its processes need, in a process to fork from.

That runs during the checks of ``miles-async train`` and the start of Ray, so this module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from miles_async.arguments import Arguments
from miles_async.runtime.device import choose_device
from miles_async.runtime.environment import worker_environment
from miles_async.runtime.processes.fork_server_process import ForkServers
from miles_async.runtime.processes.run_process import mark_processes

COMMON = ("torch", "transformers.models.auto.tokenization_auto", "transformers.modeling_utils")


@contextmanager
def early_imports(arguments: Arguments) -> Iterator[ForkServers]:
    """Import during the context; when it ends, so do the processes that were forked.

    Nothing is forked on CUDA: there this only reads the packages from disk ahead of the processes that import them.
    """
    mark_processes()
    cluster = arguments.cluster
    servers = ForkServers(COMMON, worker_environment(cluster.forward_env, cpu=choose_device(cluster.device) == "cpu"))
    servers.start()
    try:
        yield servers
    finally:
        asyncio.run(servers.stop())
