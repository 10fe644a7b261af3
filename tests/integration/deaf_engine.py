"""A broken loader for SGLang, as its plugin: it takes each tensor once and discards every update after that.

Only in a server that was started with ``DEAF``, and with everything else as it should be: the server answers that it
loaded the weights, and reports their version. Imported in the server's processes alone, by the entry point that
``conftest.py`` declares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor

DEAF = "--served-model-name=deaf"


def register() -> None:
    """Breaks the loader of Qwen3 in this process."""
    if DEAF not in sys.argv:
        return
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM

    load = Qwen3ForCausalLM.load_weights
    seen: set[str] = set()

    def load_once(model: object, weights: Iterable[tuple[str, Tensor]]) -> None:
        fresh = [(name, tensor) for name, tensor in weights if name not in seen]
        seen.update(name for name, _ in fresh)
        load(model, fresh)

    Qwen3ForCausalLM.load_weights = load_once
