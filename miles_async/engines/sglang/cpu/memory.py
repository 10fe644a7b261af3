"""Memory of an engine on CPU: SGLang's defaults assume a GPU that is not shared.

SGLang takes what is free before it loads the model, times ``--mem-fraction-static``, less what is no longer free
afterwards, whichever process took it. So the fraction leaves room for neighbours that start in the same moment, and
``--max-total-tokens`` sets the size of the cache.
"""

from __future__ import annotations

from pathlib import Path

from miles_async.arguments.model_files import read_config
from miles_async.engines.cache_bytes import cache_bytes_per_token, state_bytes
from miles_async.runtime.memory import free_memory

RUNNING_REQUESTS = 64  # at once; a CPU gains nothing from larger batches
LEAST_TOKENS = 16384  # kept wherever there is room: prefixes of many prompts
CACHE_SHARE = 0.25  # of the memory that is free, for the caches of all engines of a run on a machine
STATES = 6  # kept per request of a hybrid model: SGLang wants 3 while it runs, and prefixes have theirs
_STATIC_FRACTION = 0.9


def memory_flags(model_path: str, dtype: str, *, longest: int, running: int, engines: int) -> tuple[str, ...]:
    """SGLang's arguments for an engine that shares this machine with others.

    ``longest``: tokens of prompt and response. ``running``: requests that it gets at once. ``engines``: of this run on
    this machine.
    """
    config = read_config(Path(model_path))  # empty for a name of the hub
    longest = min(longest, config.get("max_position_embeddings") or longest)
    running = min(running, RUNNING_REQUESTS)
    wanted = max(2 * running * longest, LEAST_TOKENS)  # twice: prefixes are kept for the next turn, or sample
    per_token = cache_bytes_per_token(config, dtype)
    room = free_memory() * CACHE_SHARE / engines
    states: tuple[str, ...] = ()
    if per_state := state_bytes(config, dtype):
        room /= 2  # the other half is for states
        states = (f"--max-mamba-cache-size={max(STATES, min(STATES * RUNNING_REQUESTS, int(room / per_state)))}",)
    affordable = int(room / per_token) if per_token else LEAST_TOKENS  # or unknown
    return (
        *states,
        f"--mem-fraction-static={_STATIC_FRACTION}",
        f"--max-total-tokens={max(min(wanted, affordable), longest)}",
        f"--max-running-requests={RUNNING_REQUESTS}",
    )
