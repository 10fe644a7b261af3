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

Written by `.venv/bin/python -m scripts.families_page` from the table of the tests' cases. `model_type` is a field of
`--hf-checkpoint`'s config.json.

**yes**: `tests/integration/test_megatron_layouts.py` compares a tiny model of the family with transformers and plain
PyTorch in this layout, on CPU in fp32:

- log-probs of packed sequences (1e-5 absolute);
- losses and norms of gradients of three rollout steps (1e-4 and 1e-3 relative);
- the export, bit by bit, against the files that were loaded;
- log-probs after these steps of AdamW (5e-3 absolute).

*Engine*: `tests/integration/test_families_verified.py` publishes the trainer's weights to a real SGLang server with so
many tensor-parallel ranks, and compares every element; a request in flight continues when it is retracted and when it
is kept in place. `gemma4_text` and `nemotron_h` are published in bf16 too, where
`tests/integration/test_megatron_checkpoints.py` trains and resumes them. The experts of their mixtures are replayed, as
those of `qwen3_moe`, in `tests/integration/test_routing_replay.py` and `tests/integration/test_routing_replay_real.py`.

`qwen2_5_vl`, `qwen3_vl` and `qwen3_vl_moe` read images. `tests/integration/test_vision_models.py` compares the same for
batches with images and texts (log-probs within 2e-5, after training within 1e-3),
`tests/integration/test_vision_engine.py` what an engine samples after images, also with agents and with replayed
experts. The vision tower, transformers' own, is trained, unless `--freeze-vision-tower` is given. Refused for them are
layouts other than data and expert parallelism, adapters, shared prefixes, a critic and a teacher. megatron-bridge's
model of Qwen3-VL, which needs Transformer Engine, is not used on any device.

Files of `qwen3_vl_moe` hold a layer's experts as [experts, input, output]. transformers 5.19 reads both orders by their
shapes and writes the other one, which is refused here: SGLang 0.5.23 expects the published order. So are sizes with
which a matrix is square.

The layers are those for CPUs (`miles_async/backends/megatron/host/spec.py`); Transformer Engine's, which GPUs use, were
not compared. Gemma 2 to 4 have the host layers on GPUs too. Engines of `deepseek_v32` and `glm_moe_dsa` need GPUs:
SGLang 0.5.23 chooses the tokens of sparse attention with kernels for GPUs only, and nothing was published to one. These
choices are not replayed in training: SGLang 0.5.23 returns them on GPUs alone, from engines whose attention is not
split (its module `srt.state_capturer.indexer_topk`), as 2,048 numbers of 4 bytes per token and layer, which are 0.5 MB
per token of DeepSeek-V3.2 and 4 GB for a sample of 8,192 tokens.

`gemma4_text` is Gemma 4 of the sizes 31B and 26B-A4B. Refused are E2B and E4B: their layers add embeddings of their own
(`hidden_size_per_layer_input`) and take keys and values of another layer (`num_kv_shared_layers`), which in
megatron-bridge 0.6 exclude pipeline stages and packed sequences. Adapters and shared prefixes are refused, too. SGLang
0.5.23 fails with a config of the text model alone, and keeps scales of routers that a publication replaces;
`miles_async/engines/sglang/gemma4.py` mends both on every device.

On GPUs `nemotron_h` needs mamba-ssm and causal-conv1d, which `requirements/gpu.lock` lacks: pip compiles them against
the installed torch if it builds without isolation. Its tiny models have `time_step_min` 1e-9, by which transformers
bounds the steps of Mamba-2; Megatron, SGLang and NVIDIA's own code do not.
"""

TEXT_MODEL = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen3.5-4B", dtype="auto")
text = type(model)(model.config)
text.load_state_dict(model.state_dict(), assign=True)
text.save_pretrained("Qwen3.5-4B-text")  # and the tokenizer's files next to it
"""
"""Writes the text model of a Qwen3.5 checkpoint. What is loaded would be saved by its names in the checkpoint."""

TEXT_MODEL_OF_GEMMA4 = """\
from transformers import AutoModelForImageTextToText, Gemma4ForCausalLM

model = AutoModelForImageTextToText.from_pretrained("gemma-4-31B-it", dtype="auto")
text = Gemma4ForCausalLM(model.config.text_config)
text.model, text.lm_head = model.model.language_model, model.lm_head
text.save_pretrained("gemma-4-31B-it-text")  # and the tokenizer's files beside it
"""
"""The same for Gemma 4."""

FOOTER = f"""
Qwen3.5's checkpoints hold an image encoder. This writes the text model, without layers for multi-token prediction:

```python
{TEXT_MODEL}```

And this that of Gemma 4, whose checkpoints hold encoders of images and sound:

```python
{TEXT_MODEL_OF_GEMMA4}```

A layout's name is its combination: `pp2-virtual2-cp2` has 2 pipeline stages of 2 virtual ones each, and 2
context-parallel ranks. Anything else that config.json of a family may not say, such as another scaling of positions, is
refused at startup with the field. Checkpoints are expected without quantization.
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
        cells = ["yes" if layout == "one-rank" or (layout == "ep2" and "moe" in name) else "" for layout in COLUMNS]
        yield f"| `{kind}` | {name} | {' | '.join(cells)} | dp2 | TP 1 |"
    yield from ("", "## Refused", "", "| model_type | why, and what to do |", "|---|---|")
    yield from (f"| `{kind}` | {reason} |" for kind, reason in REFUSED.items())
    yield "| any other | it was not compared with transformers |"


def page() -> str:
    """The whole page."""
    return HEADER + "\n".join(lines()) + "\n" + FOOTER


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
