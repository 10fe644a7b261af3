"""Starts an unmodified SGLang server: ``python -m miles_async.engines.sglang.launcher <arguments of SGLang>``.

What only a CPU needs is in ``cpu/``: stand-ins for packages that are not there, forks, faster attention.

Its doors open with the keys that it is given in its environment, see ``locks.py``. Its ranks meet at its own address
alone, see ``rank_store.py``.
It takes all weights of a publication by one request, see ``weight_stream.py``, answers in packed form where a request
asks for it, see ``packed_answers.py``, and sleeps while it is paused, see ``paused_sleep.py``.
With HELD_WEIGHTS_VARIABLE in the environment the server can also say what its model holds, see ``held_weights.py``, and
with WEIGHT_GROUP_SECONDS_VARIABLE it waits no longer than that for others that get weights with it, see
``weight_groups.py``.

Everything happens at module level, since SGLang's processes are spawned and spawning re-imports this module.
"""

from __future__ import annotations

import os
import sys

from miles_async.engines.sglang import cpu
from miles_async.engines.sglang.names import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE

cpu.prepare(sys.argv)
# sglang.srt.debug_utils.dumper imports megatron.core, and through it wandb, wherever it finds it.
sys.modules["megatron"] = None  # type: ignore[assignment]

# After the packages that torch looks for.
from miles_async.engines.sglang import (  # noqa: E402
    load_file,
    paused_sleep,
    rank_store,
    weight_stream,
)

load_file.register()
paused_sleep.register()
rank_store.register()
weight_stream.register()
cpu.install(sys.argv)
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
