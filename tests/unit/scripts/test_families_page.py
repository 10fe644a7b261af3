"""docs/families.md names every family that is trained, and its tables say what the tests' cases are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_async.backends.megatron.families.hf_config import read_config
from miles_async.backends.megatron.families.known import FAMILIES, REFUSED
from scripts.families_page import COLUMNS, tables
from tests.integration.family_table import COMPARED, DEEPER, EVERY_DAY, SERVED, SERVED_AT_NIGHT, WITH_IMAGES
from tests.integration.tiny_models import FAMILIES as TINY_MODELS
from tests.integration.tiny_models import model_type

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def test_the_page_names_every_family_that_is_trained() -> None:
    # covers: M21
    first, _, _ = PAGE.read_text().partition("Any other is refused")
    assert sorted(re.findall(r"`(\w+)`", first.partition("are trained:")[2])) == sorted(FAMILIES)


def test_the_tables_say_where_a_model_is_compared_and_what_is_refused() -> None:
    # covers: M21
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables().splitlines()]
    by_model = {row[1]: row for row in rows if len(row) == 4 + len(COLUMNS)}
    for name in TINY_MODELS:
        cells = dict(zip(COLUMNS, by_model[name][2:], strict=False))
        assert {layout for layout, cell in cells.items() if cell == "yes"} == {
            layout for layout in COLUMNS if name in COMPARED[layout]
        }
    assert "cp4" in by_model["qwen3"][-2]
    assert by_model["qwen3-tied"][-1] == "TP 2"
    assert {row[0].strip("`"): row[1] for row in rows if len(row) == 2}.items() >= REFUSED.items()


def test_every_family_that_is_trained_is_compared_on_one_rank_and_no_other() -> None:
    assert {model_type(name) for name in COMPARED["one-rank"]} | {*WITH_IMAGES} == set(FAMILIES)
    assert {kind for kind, family in FAMILIES.items() if family.images} == {*WITH_IMAGES}
    assert not {*FAMILIES} & {*REFUSED}
    assert set(COLUMNS) <= set(COMPARED)


def test_cases_are_of_models_that_there_are() -> None:
    named = {name for models in COMPARED.values() for name in models} | {name for name, _ in SERVED + SERVED_AT_NIGHT}
    assert named <= {*TINY_MODELS, *DEEPER}


def test_cases_of_every_day_are_among_those_of_the_night() -> None:
    assert {(layout, name) for layout in EVERY_DAY for name in EVERY_DAY[layout]} <= {
        (layout, name) for layout in COMPARED for name in COMPARED[layout]
    }


PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
VISION_OF_GEMMA4 = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "position_embedding_size": 16,
}


@pytest.mark.parametrize(
    ("family", "kind", "vision", "name", "program"),
    [
        ("qwen3.5", "Qwen3_5", VISION, "Qwen3.5-4B", PROGRAMS[0]),
        ("gemma4", "Gemma4", VISION_OF_GEMMA4, "gemma-4-31B-it", PROGRAMS[1]),
    ],
)
def test_lines_for_the_text_model_of_a_checkpoint_with_images_do_it(
    family: str,
    kind: str,
    vision: dict[str, object],
    name: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    config = getattr(transformers, f"{kind}Config")(text_config=TINY_MODELS[family][1], vision_config=vision)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained(name)
    exec(program)
    assert read_config(Path(f"{name}-text"))["model_type"] == model_type(family)
    written = load_file(f"{name}-text/model.safetensors")
    expected = {
        key.replace("model.language_model.", "model."): tensor
        for key, tensor in load_file(f"{name}/model.safetensors").items()
        if ".visual." not in key and "vision" not in key
    }
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_the_program_for_the_text_model_of_kimi_does_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from examples.math import kimi_text

    whole, written = tmp_path / "whole", tmp_path / "text"
    whole.mkdir()
    text = {"model_type": "kimi_k2", "num_hidden_layers": 61, "quantization_config": {"format": "pack-quantized"}}
    (whole / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    save_file(
        {"language_model.model.norm.weight": torch.ones(2), "vision_tower.a": torch.ones(1)}, whole / "1.safetensors"
    )
    save_file(
        {"language_model.lm_head.weight": torch.zeros(3), "mm_projector.b": torch.ones(1)}, whole / "2.safetensors"
    )
    kimi_text.main([str(whole), str(written)])
    assert read_config(written) == {"model_type": "kimi_k2", "num_hidden_layers": 61}
    index = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"model.norm.weight": "1.safetensors", "lm_head.weight": "2.safetensors"}
    for name, file in index.items():
        assert load_file(written / file)[name].equal(load_file(whole / file)[f"language_model.{name}"])
