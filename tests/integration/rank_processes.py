"""Runs a function on N processes that form one torch.distributed world, for tests; never leaves one behind.

All of a session's processes are forked from one that has imported megatron, which takes seconds, once.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def forked_context() -> ForkServerContext:
    """Starts processes that have imported megatron."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.rank_imports"])
    return context


def run_ranks(world_size: int, function: Callable[..., object], *args: object, timeout: float = 120.0) -> list[Any]:
    """``function(rank, world_size, store, *args)`` on every rank; the results in rank order.

    The first rank that fails ends all others, with its traceback in the RuntimeError.
    """
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    context = forked_context()
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, rank, world_size, server.port, function, args)
        process = context.Process(target=_main, args=arguments, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: dict[Connection, int], timeout: float) -> list[object]:
    deadline = time.monotonic() + timeout
    results: dict[int, object] = {}
    world_size = len(pipes)
    while len(results) < world_size:
        ready = wait(list(pipes), timeout=deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {sorted(pipes.values())} did not finish within {timeout:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if failure:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
    return [results[rank] for rank in range(world_size)]


def _main(pipe: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any) -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")  # megatron's about fused kernels, torch's about names that megatron uses
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    try:
        pipe.send((None, function(rank, world_size, store, *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
