"""docs/families.md is what the table of the tests' cases says, and every family that is trained is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.backends.megatron.families.hf_config import read_config
from miles_async.backends.megatron.families.known import FAMILIES, REFUSED
from scripts.families_page import COLUMNS, PAGE, TEXT_MODEL, page
from tests.integration.family_table import COMPARED, DEEPER, EVERY_DAY, SERVED, SERVED_AT_NIGHT, WITH_IMAGES
from tests.integration.tiny_models import FAMILIES as TINY_MODELS
from tests.integration.tiny_models import model_type


def test_the_page_is_current() -> None:
    # covers: M21
    assert PAGE.read_text() == page(), "run .venv/bin/python -m scripts.families_page"


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


def test_lines_for_the_text_model_of_a_checkpoint_with_images_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=TINY_MODELS["qwen3.5"][1], vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained("Qwen3.5-4B")
    exec(TEXT_MODEL)
    assert read_config(Path("Qwen3.5-4B-text"))["model_type"] == "qwen3_5_text"
    written = load_file("Qwen3.5-4B-text/model.safetensors")
    expected = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file("Qwen3.5-4B/model.safetensors").items()
        if not name.startswith("model.visual.")
    }
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
