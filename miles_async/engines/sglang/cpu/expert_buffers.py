"""In the server's process, on a CPU: buffers of experts without CUDA.

SGLang (0.5.23) keeps the experts of ``--enable-return-routed-experts`` in memory that it registers with CUDA, whatever
its device is.
"""

from __future__ import annotations

FLAG = "--enable-return-routed-experts"

_REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def register() -> None:
    """Skip registering the buffers with CUDA."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_REGISTER, _leave, HookType.REPLACE)


def _leave(*_: object) -> None:
    pass
