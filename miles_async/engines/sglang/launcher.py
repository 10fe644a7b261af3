"""Starts an unmodified SGLang server: ``python -m miles_async.engines.sglang.launcher <arguments of SGLang>``.

Where everything that SGLang imports is installed this is ``python -m sglang.launch_server``. Where
torchvision, triton or ``sgl_kernel`` is missing (a machine without a GPU) they become mentionable, see
``absent_modules.py``.

Its doors open with the keys that it is given in its environment, see ``locks.py``. Its ranks meet at its own address
alone, see ``rank_store.py``.
It takes all weights of a publication by one request, see ``weight_stream.py``, answers in packed form where a request
asks for it, see ``packed_answers.py``, and sleeps while it is paused, see ``paused_sleep.py``. On a CPU, requests share
prefills, see ``shared_prefills.py``, and attention is computed for many at once, see ``cpu_attention.py``.
With HELD_WEIGHTS_VARIABLE in the environment the server can also say what its model holds, see ``held_weights.py``, and
with WEIGHT_GROUP_SECONDS_VARIABLE it waits no longer than that for others that get weights with it, see
``weight_groups.py``.

Everything happens at module level, since SGLang's processes are spawned and spawning re-imports this module. On a CPU
they are forked instead: what SGLang imports takes a process 10 s, which is most of its start.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from miles_async.engines.sglang.absent_modules import allow_mentioning, is_absent
from miles_async.engines.sglang.names import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE


def _runs_on_cpu(arguments: list[str]) -> bool:
    """True if ``--device`` is cpu. The last one counts, as in argparse."""
    device = ""
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name == "--device":
            device = value
        elif name.startswith("--device="):
            device = name.partition("=")[2]
    return device == "cpu"


def _allow_torchvision() -> None:
    from transformers.utils import import_utils

    # Answered now, "no", and cached: afterwards the name would seem to be installed.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    allow_mentioning("torchvision", {"__version__": "0"})


def _allow_triton() -> None:
    import torch._inductor.runtime.triton_compat  # noqa: F401  (torch must keep knowing that there is no triton)
    from torch.utils import _triton

    _triton.has_triton_package()
    _triton.has_triton()

    class Config:
        """Autotuning configurations are built at import and never read."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...

    class Constexpr:
        """Module-level constants of kernels that never run."""

        def __init__(self, value: object = None) -> None:
            self.value = value

    allow_mentioning(
        "triton",
        {
            "__version__": "3.0.0",
            "cdiv": lambda a, b: -(a // -b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
            "Config": Config,
            "language.constexpr": Constexpr,
        },
    )


def _fork_always() -> None:
    """Override SGLang's choice of spawning, which only CUDA needs."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[assignment]


if _runs_on_cpu(sys.argv):
    _fork_always()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
if is_absent("torchvision"):
    _allow_torchvision()
if is_absent("triton"):
    _allow_triton()
if is_absent("sgl_kernel"):
    allow_mentioning("sgl_kernel", {"__version__": "0.0.0"})
# sglang.srt.debug_utils.dumper imports megatron.core, and through it wandb, wherever it finds it.
sys.modules["megatron"] = None  # type: ignore[assignment]

# After the packages that torch looks for.
from miles_async.engines.sglang import (  # noqa: E402
    cpu_attention,
    host_buffers,
    load_file,
    paused_sleep,
    rank_store,
    shared_prefills,
    weight_stream,
)

load_file.register()
paused_sleep.register()
rank_store.register()
weight_stream.register()
if _runs_on_cpu(sys.argv):
    shared_prefills.register()
    cpu_attention.register()
if _runs_on_cpu(sys.argv) and host_buffers.FLAG in sys.argv:
    host_buffers.register()
if HELD_WEIGHTS_VARIABLE in os.environ:
    from miles_async.engines.sglang import held_weights

    held_weights.register()
if WEIGHT_GROUP_SECONDS_VARIABLE in os.environ:
    from miles_async.engines.sglang import weight_groups

    weight_groups.register()


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from miles_async.engines.sglang import packed_answers
    from miles_async.engines.sglang.locks import lock
    from miles_async.runtime.network.keys import take_engine_keys

    if (keys := take_engine_keys(os.environ)) is not None:
        lock(keys)
    packed_answers.register()
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
