"""The model-parallel RNG tracker forks the CPU generator (megatron-core 0.16: it reads the CUDA one)."""

from __future__ import annotations

import logging
import types

import torch


def _patch_random(module: types.ModuleType) -> None:
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()  # type: ignore[attr-defined]
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]
    # fork() warns when the CPU generator moved inside of it; here that generator is the one that is forked.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


PATCHES = {"megatron.core.tensor_parallel.random": _patch_random}
