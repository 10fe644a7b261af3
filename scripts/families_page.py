"""Write docs/families.md: families of models, and the layouts of ranks in which tests compare each with transformers.

From the repository root:

    .venv/bin/python -m scripts.families_page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_async.backends.megatron.families.known import FAMILIES, REFUSED
from tests.integration.family_table import COMPARED, DEEPER, SERVED, SERVED_AT_NIGHT, WITH_IMAGES
from tests.integration.tiny_models import FAMILIES as TINY_MODELS
from tests.integration.tiny_models import model_type

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"

COLUMNS = {
    "one-rank": "1 rank",
    "tp2-sequence-parallel": "TP 2, SP",
    "tp2": "TP 2",
    "pp2": "PP 2",
    "cp2": "CP 2",
    "ep2": "EP 2",
    "tp2-ep2": "TP 2, EP 2",
}
"""Layouts with a column of their own → heading; the others are listed."""

HEADER = """\
# Families of models

Written by `.venv/bin/python -m scripts.families_page` from the table that the tests take their cases from; not edited
by hand. `model_type` is a field of `--hf-checkpoint`'s config.json.

**yes**: `tests/integration/test_megatron_layouts.py` builds a tiny model of the family with random weights and compares
all of the following with transformers and plain PyTorch in this layout, on CPU in fp32:

- log-probs of packed sequences (1e-5 absolute);
- losses and norms of gradients of three rollout steps (1e-4 and 1e-3 relative);
- the export, bit by bit, against the files that were loaded;
- log-probs after these steps of AdamW (5e-3 absolute).

*Engine*: `tests/integration/test_families_verified.py` publishes what the trainer exports to a real SGLang server with
so many tensor-parallel ranks, and compares every element that the server holds.

`qwen2_5_vl` reads images. `tests/integration/test_vision_models.py` compares the same for batches with images and texts
(log-probs within 2e-5, after training within 1e-3), `tests/integration/test_vision_engine.py` what an engine samples
after images under two versions of the weights. Its vision tower is trained, unless `--freeze-vision-tower` is given.
Refused for it are layouts other than data-parallel ones, adapters, shared prefixes, a critic, a teacher, environments,
agents and supervised fine-tuning.

The layers are from `miles_async/backends/megatron/host/spec.py`, on CPU. Transformer Engine's, which GPUs use, were
not compared. Engines of `deepseek_v32` and `glm_moe_dsa` need GPUs, as SGLang 0.5.23 chooses the tokens of sparse
attention with kernels for GPUs only; nothing was published to one. Gemma 2 and 3 have the host layers on GPUs too:
nothing of Transformer Engine computes the same.
"""

TEXT_MODEL = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen3.5-4B", dtype="auto")
text = type(model)(model.config)
text.load_state_dict(model.state_dict(), assign=True)
text.save_pretrained("Qwen3.5-4B-text")  # and the tokenizer's files beside it
"""
"""Writes the text model of a Qwen3.5 checkpoint. What is loaded would be saved by its names in the checkpoint."""

FOOTER = f"""
Qwen3.5's checkpoints hold an image encoder. This writes the text model, without layers for multi-token prediction:

```python
{TEXT_MODEL}```

A layout's name is its combination, such as `pp2-virtual2-cp2`: 2 pipeline stages of 2
virtual ones each, 2 context-parallel ranks.

What else config.json of a family may not say, such as another scaling of positions, is refused at the start with the
field that is the reason. Checkpoints are expected without quantization.
"""


def lines() -> Iterator[str]:
    """Lines of the page after its header."""
    yield from ("", f"| model_type | tiny model | {' | '.join(COLUMNS.values())} | other layouts | engine |")
    yield "|---|---|" + "---|" * (len(COLUMNS) + 2)
    for kind in FAMILIES:
        for name in (name for name in TINY_MODELS if model_type(name) == kind):
            cells = ["yes" if name in COMPARED[layout] else "" for layout in COLUMNS]
            others = [
                layout
                for layout, models in COMPARED.items()
                if layout not in COLUMNS and any(DEEPER.get(model, (model,))[0] == name for model in models)
            ]
            engines = [f"TP {ranks}" for served, ranks in (*SERVED, *SERVED_AT_NIGHT) if served == name]
            yield f"| `{kind}` | {name} | {' | '.join([*cells, ', '.join(others), ', '.join(engines)])} |"
    for kind, name in WITH_IMAGES.items():
        yield f"| `{kind}` | {name} | yes | {' | ' * (len(COLUMNS) - 1)}dp2 | TP 1 |"
    yield from ("", "## Refused", "", "| model_type | why, and what to do |", "|---|---|")
    yield from (f"| `{kind}` | {reason} |" for kind, reason in REFUSED.items())
    yield "| any other | it was not compared with transformers |"


def page() -> str:
    """The whole page."""
    return HEADER + "\n".join(lines()) + "\n" + FOOTER


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
