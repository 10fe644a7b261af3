"""Additions to an SGLang server on a CPU. On GPUs only the stand-ins are installed, which find nothing missing.

``stand_ins`` for packages that only GPUs have, ``memory`` for machines that engines share, ``prefills`` and
``attention`` for speed, ``gated_delta``, ``mamba`` and ``float8`` for layers whose kernels need a GPU, ``gaps`` for the
rest.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence

from miles_async.engines.sglang.cpu import stand_ins

NO_NCCL = "none on a CPU"  # a file that does not exist; SGLang's error says that this is expected


def is_asked_for(arguments: Sequence[str]) -> bool:
    """True if SGLang's ``--device`` is cpu. The last one counts, as in argparse."""
    device = ""
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name == "--device":
            device = value
        elif name.startswith("--device="):
            device = name.partition("=")[2]
    return device == "cpu"


def prepare(arguments: Sequence[str]) -> None:
    """Install stand-ins for missing packages before SGLang is imported; on a CPU, fork instead of spawn.

    SGLang spawns, which only CUDA needs: what it imports takes a process 10 s, which is most of its start.
    """
    if is_asked_for(arguments):
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[assignment]
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # SGLang (0.5.23) uses the NCCL of a CUDA build of torch on a CPU, too, where ranks of one engine then fail.
        os.environ["SGLANG_NCCL_SO_PATH"] = NO_NCCL
    stand_ins.install()


def install(arguments: Sequence[str]) -> None:
    """Patch a server on a CPU; nothing on GPUs."""
    if not is_asked_for(arguments):
        return
    import torch._dynamo.config

    torch._dynamo.config.disable = True  # SGLang compiles small functions, which takes a C++ compiler and minutes
    from miles_async.engines.sglang.cpu import attention, float8, gaps, gated_delta, mamba, prefills

    prefills.register()
    attention.register()
    gated_delta.register()
    mamba.register()
    float8.register()
    gaps.register(arguments)
