"""Which tiny models are compared with transformers, in which layouts of ranks, and which are put on a real engine.

The tests take their cases from here, and ``scripts/families_page.py`` makes the tables of docs/families.md.
"""

from __future__ import annotations

from tests.integration.tiny_models import FAMILIES

DENSE = ("llama", "qwen2", "qwen3", "qwen3-tied", "gemma", "gemma4", "qwen3.5", "nemotron-h")
MIXTURES = (
    "qwen3-moe", "qwen3-next", "qwen3.5-moe", "olmoe", "gpt-oss", "glm4-moe", "glm4-moe-lite", "minimax-m2",
    "deepseek-v3", "moonlight", "deepseek-v32", "glm5", "nemotron-h-moe", "gemma4-moe",
)  # fmt: skip
EVERYWHERE = tuple(name for name in FAMILIES if name != "kimi-k2")  # which differs from deepseek-v3 in its config only

DEEPER = {
    "qwen3-three-layers": ("qwen3", 3),
    "deepseek-v3-three-layers": ("deepseek-v3", 3),
    "qwen3-four-layers": ("qwen3", 4),
    "qwen3-tied-four-layers": ("qwen3-tied", 4),
    "deepseek-v3-four-layers": ("deepseek-v3", 4),
}
"""Name → (family, layers), of models with more than two."""

COMPARED: dict[str, tuple[str, ...]] = {
    "one-rank": tuple(FAMILIES),
    "one-rank-3-micro-batches": ("qwen3", "qwen3-moe"),
    "dp2": ("qwen3", "qwen3-tied", "qwen3-moe", "qwen3-next", "nemotron-h"),
    "dp2-overlap": ("qwen3", "qwen3-tied", "qwen3-moe"),
    "one-rank-recompute-block": ("qwen3", "qwen3-moe", "qwen3-next", "gemma3", "gemma4", "nemotron-h"),
    "one-rank-shared-prefixes": ("qwen3", "llama", "qwen3-moe"),
    "tp2-shared-prefixes": ("qwen3",),
    "pp2-shared-prefixes": ("qwen3-tied",),
    "tp2-sequence-parallel": tuple(name for name in EVERYWHERE if name != "gpt-oss"),
    "tp2": DENSE,  # megatron trains experts under tensor parallelism only with sequence parallelism
    "tp4": ("qwen2", "qwen3-tied"),  # more ranks than heads of keys and values
    "pp2": EVERYWHERE,
    "pp2-unequal": ("qwen3-three-layers", "deepseek-v3-three-layers"),
    "pp2-unequal-cp2": ("qwen3-three-layers", "deepseek-v3-three-layers"),
    "pp2-virtual2": ("qwen3-four-layers", "qwen3-tied-four-layers", "deepseek-v3-four-layers"),
    "tp2-pp2-virtual2": ("qwen3-tied-four-layers", "deepseek-v3-four-layers"),
    "dp2-pp2-virtual2": ("qwen3-four-layers",),
    "cp2": EVERYWHERE,
    "tp2-cp2": ("qwen3-tied", "qwen3-moe", "qwen3-next", "deepseek-v3", "nemotron-h"),
    "pp2-cp2": ("qwen3-tied", "deepseek-v3"),
    "pp2-virtual2-cp2": ("qwen3-tied-four-layers",),
    "dp2-cp2": ("qwen3", "qwen3-moe"),
    "cp4": ("qwen3",),
    "cp2-ep2": ("qwen3-moe", "deepseek-v3"),
    "ep2": MIXTURES,
    "pp2-ep2": MIXTURES,
    "etp2": ("qwen3-moe", "deepseek-v3"),
    "tp2-etp1": ("qwen3-moe", "glm4-moe", "gpt-oss", "deepseek-v3"),
    "ep2-etp2": ("qwen3-moe", "deepseek-v3"),
    "tp2-ep2": (*MIXTURES, "kimi-k2"),
    "tp2-ep2-etp2": (
        "qwen3-moe",
        "qwen3-next",
        "glm4-moe",
        "glm4-moe-lite",
        "minimax-m2",
        "deepseek-v3",
        "moonlight",
        "nemotron-h-moe",
        "gemma4-moe",
    ),
}
"""Layout of test_megatron_layouts.py → models. There log-probs, losses, norms of gradients, the export and the model
after three rollout steps are compared, in fp32.
"""

EVERY_DAY: dict[str, tuple[str, ...]] = {
    "one-rank": tuple(FAMILIES),
    "dp2-overlap": ("qwen3-tied", "qwen3-moe"),
    "one-rank-recompute-block": ("qwen3",),
    "tp2-shared-prefixes": ("qwen3",),
    "pp2-shared-prefixes": ("qwen3-tied",),
    "tp2-sequence-parallel": ("qwen3", "glm4-moe"),
    "tp2": ("qwen2", "qwen3.5"),
    "tp4": ("qwen3-tied",),
    "pp2": ("glm4",),
    "pp2-unequal": ("deepseek-v3-three-layers",),
    "tp2-pp2-virtual2": ("qwen3-tied-four-layers",),
    "cp2": ("qwen3", "qwen3-next", "deepseek-v3"),
    "tp2-cp2": ("qwen3-tied",),
    "cp2-ep2": ("deepseek-v3",),
    "ep2": ("qwen3-moe", "gpt-oss"),
    "tp2-ep2": ("deepseek-v3",),
    "tp2-ep2-etp2": ("glm4-moe",),
}
"""Those of ``COMPARED`` that `make test` compares: every family once, every way to split a model with one or two
families, alone or with others (tp2-ep2 has experts that tensor parallelism does not split, cp2-ep2 has replicas). The
others are compared at night.
"""

SERVED = (("gemma", 1), ("qwen3-moe", 2), ("glm4-moe-lite", 1), ("minimax-m2", 1))
"""(family, tensor-parallel ranks of the engine) of test_families_verified.py: what is exported is compared with what a
real SGLang server holds.
"""

SERVED_AT_NIGHT = (
    ("llama", 1),
    ("mistral", 1),
    ("qwen2", 1),
    ("qwen3", 1),
    ("qwen3-tied", 2),
    ("gemma2", 1),
    ("gemma3", 1),
    ("gemma4", 2),
    ("gemma4-moe", 1),
    ("glm4", 2),
    ("olmoe", 1),
    ("glm4-moe", 1),
    ("deepseek-v3", 1),
    ("kimi-k2", 1),
    ("qwen3-next", 2),
    ("qwen3.5", 1),
    ("qwen3.5-moe", 1),
    ("nemotron-h", 2),
    ("nemotron-h-moe", 1),
)

SERVED_IN_BF16 = (("gemma4", 1), ("gemma4-moe", 1), ("nemotron-h", 1), ("nemotron-h-moe", 1))
"""The same in bfloat16, of families whose engines this project completes."""

WITH_IMAGES: dict[str, str] = {"qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl", "qwen3_vl_moe": "qwen3-vl-moe"}
"""model_type → tiny model of test_vision_models.py, and of test_vision_engine.py, which publishes to an engine of one
rank and samples there.
"""

_ALL_WITH_IMAGES = tuple(WITH_IMAGES.values())

COMPARED_WITH_IMAGES: dict[str, tuple[str, ...]] = {
    "one-rank": _ALL_WITH_IMAGES,
    "dp2": _ALL_WITH_IMAGES,
    "tp2-sequence-parallel": _ALL_WITH_IMAGES,
    "tp2": ("qwen2.5-vl", "qwen3-vl"),
    "pp2": _ALL_WITH_IMAGES,
    "pp2-virtual2": ("qwen2.5-vl", "qwen3-vl"),
    "cp2": _ALL_WITH_IMAGES,
    "tp2-cp2": _ALL_WITH_IMAGES,
    "pp2-cp2": ("qwen2.5-vl", "qwen3-vl"),
    "ep2": ("qwen3-vl-moe",),
    "pp2-ep2": ("qwen3-vl-moe",),
    "cp2-ep2": ("qwen3-vl-moe",),
    "tp2-ep2": ("qwen3-vl-moe",),
    "tp2-ep2-etp2": ("qwen3-vl-moe",),
}
"""Layout of test_megatron_layouts.py → models whose log-probs, loss, gradients, export, checkpoint and trained model
test_vision_models.py compares in it, with images and texts.
"""

EVERY_DAY_WITH_IMAGES: dict[str, tuple[str, ...]] = {
    "dp2": ("qwen2.5-vl",),
    "tp2-sequence-parallel": ("qwen3-vl",),
    "pp2": ("qwen3-vl",),
    "cp2": ("qwen2.5-vl",),
    "tp2-ep2": ("qwen3-vl-moe",),
}
"""Those of them that `make test` compares."""
