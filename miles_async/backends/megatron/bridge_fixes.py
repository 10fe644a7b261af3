"""Bugs of megatron-bridge 0.3 that corrupt weights silently. Independent of the device: applied on every platform.

- A strided split is scattered to tensor-parallel ranks: gloo ignores strides, so row-parallel weights
  come out permuted at TP > 1.
- The expert number is parsed out of TEGroupedMLP's parameter names only; SequentialMLP's experts
  (``local_experts.3.linear_fc1.weight``) are exported and numbered over expert-parallel ranks wrongly.

``tests/integration/test_megatron_compat.py`` fails when upstream no longer needs one of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import Any

AFFECTED = "0.3."

logger = logging.getLogger(__name__)
_applied = False


def apply() -> bool:
    """Fix the installed megatron-bridge if it is an affected version. True if it is. Idempotent."""
    global _applied
    version = importlib.metadata.version("megatron-bridge")
    if not version.startswith(AFFECTED):
        logger.warning("megatron-bridge %s: fixes for %sx are not applied; run the bridge tests", version, AFFECTED)
        return False
    if not _applied:
        _applied = True
        _scatter_contiguous_splits()
        _gather_sequential_experts()
        _number_sequential_experts()
    return True


def _scatter_contiguous_splits() -> None:
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_to_tp_ranks(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return scatter(self, [split.contiguous() for split in splits] if splits else splits, *args, **kwargs)

    MegatronParamMapping.scatter_to_tp_ranks = scatter_to_tp_ranks


def _gather_sequential_experts() -> None:
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    gather = MegatronParamMapping.gather_from_ep_ranks

    def gather_from_ep_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.megatron_param
        self.megatron_param = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.(?:weight|bias))$", r"\2\1", name)
        try:
            return gather(self, *args, **kwargs)
        finally:
            self.megatron_param = name

    MegatronParamMapping.gather_from_ep_ranks = gather_from_ep_ranks


def _number_sequential_experts() -> None:
    from megatron.bridge.models.conversion import model_bridge

    rename = model_bridge._megatron_local_name_to_global

    def _megatron_local_name_to_global(models: Any, config: Any, param_name: str, vp_stage: Any = None) -> str:
        name = rename(models, config, param_name, vp_stage)
        if not config.num_moe_experts:
            return name
        group = model_bridge.parallel_state.get_expert_model_parallel_group()
        first = config.num_moe_experts // group.size() * group.rank()
        return re.sub(r"(\.local_experts\.)(\d+)\.", lambda match: f"{match[1]}{int(match[2]) + first}.", name)

    model_bridge._megatron_local_name_to_global = _megatron_local_name_to_global
