"""Starts an unmodified SGLang server: ``python -m miles_async.engines.sglang.launcher <arguments of SGLang>``.

What only a CPU needs is in ``cpu/``: stand-ins for packages that are not there, forks, faster attention.

Its doors open with the keys that it is given in its environment (``locks.py``). It takes all weights of a publication
by one request (``weight_stream.py``) and answers in packed form where a request asks for it (``packed_answers.py``).
With HELD_WEIGHTS_VARIABLE in the environment it can also say what its model holds (``held_weights.py``).

Everything happens at module level, since SGLang's processes are spawned and spawning re-imports this module.
"""

from __future__ import annotations

import os
import sys

from miles_async.engines.sglang import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE, cpu
from miles_async.runtime.cuda_environment import use_installed_compilers

cpu.prepare(sys.argv)
if not cpu.is_asked_for(sys.argv):
    use_installed_compilers(os.environ)
# sglang.srt.debug_utils.dumper imports megatron.core, and through it wandb, wherever it finds it.
sys.modules["megatron"] = None  # type: ignore[assignment]

# After the packages that torch looks for.
from miles_async.engines.sglang import gemma4, patches, weight_stream  # noqa: E402

patches.move_load_file()
patches.narrow_rank_store()
patches.sleep_while_paused()
patches.keep_draft_models()
if "--load-format=dummy" in sys.argv:
    patches.have_no_cache_scales()
weight_stream.register()
gemma4.register()
cpu.install(sys.argv)
if HELD_WEIGHTS_VARIABLE in os.environ:
    from miles_async.engines.sglang import held_weights

    held_weights.register()
if WEIGHT_GROUP_SECONDS_VARIABLE in os.environ:
    patches.limit_weight_groups()


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
