"""Check that checkpoint and model have the same tensors, before anything is loaded.

megatron-bridge 0.6 at most warns about tensors that it cannot place, and continues with random or missing weights.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from miles_async.errors import ConfigurationError
from miles_async.runtime.rank_records import gather_records

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from torch.nn import Module

logger = logging.getLogger(__name__)

SHOWN = 5  # names in one error
DERIVED = (".rotary_emb.inv_freq",)  # constants in old checkpoints, which every implementation recomputes


def check(bridge: AutoBridge, modules: list[Module]) -> None:
    """Raise ConfigurationError naming tensors that would be left out. Collective."""
    config = bridge.hf_pretrained.config.get_text_config()
    placed, homeless = _local_names(bridge._model_bridge, modules)
    gathered = gather_records((placed, homeless), tuple[set[str], set[str]])
    in_model = set().union(*(placed for placed, _ in gathered))
    in_files = set(bridge.hf_pretrained.state.source.get_all_keys())
    left_out = {name for name in in_files - in_model if not name.endswith(DERIVED)}
    if modules[0].share_embeddings_and_output_weights:
        left_out.discard("lm_head.weight")
    extra_layers = {
        name for name in left_out if name.startswith("mtp.") or layer_number(name) >= config.num_hidden_layers
    }
    if extra_layers:  # transformers ignores them too
        logger.info("layers for multi-token prediction, not trained: %s", _some(extra_layers))
    problems = {
        "tensors of the checkpoint that the model has no place for": left_out - extra_layers,
        "tensors of the model that the checkpoint lacks": in_model - in_files,
        "parameters of the model that megatron-bridge does not know": set().union(*(names for _, names in gathered)),
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise ConfigurationError(
            f"--hf-checkpoint {bridge.hf_pretrained.model_name_or_path} cannot be trained correctly: {'; '.join(found)}"
        )


def _local_names(model_bridge: MegatronModelBridge, modules: list[Module]) -> tuple[set[str], set[str]]:
    """Return (Hugging Face names on this rank, megatron names that have no counterpart)."""
    registry = model_bridge.mapping_registry()
    names, unknown = set(), set()
    for name in model_bridge._megatron_global_param_names_all_pp_ranks(modules):
        if "output_layer" in name and modules[0].share_embeddings_and_output_weights:
            continue
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            unknown.add(name)
        else:
            names |= {mapping.hf_param} if isinstance(mapping.hf_param, str) else set(mapping.hf_param.values())
    # Gemma 4: where keys are the values, too, Megatron's matrix has a copy that is not used.
    if made_up := getattr(model_bridge, "_is_synthesized_kv_projection", None):
        names = {name for name in names if not made_up(name)}
    return names, unknown


def layer_number(name: str) -> int:
    """Number of the layer that a tensor belongs to, by Megatron's name or that in the files; -1 if to none."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _some(names: set[str]) -> str:
    first = sorted(names)[:SHOWN]
    return ", ".join(first) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
