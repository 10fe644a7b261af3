"""Adapters to start from: what their files say, and what flags say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.adapters import PEFT_CONFIG, check_adapters, peft_config
from miles_async.arguments.model import ModelArguments

MODEL = ModelArguments(hf_checkpoint=Path("models/base"), lora_rank=8, lora_alpha=32.0, lora_type="dora")


def problems(directory: Path, model: ModelArguments = MODEL) -> list[str]:
    return list(check_adapters(Arguments(model=replace(model, lora_adapter_path=directory))))


def saved(directory: Path, **fields: object) -> Path:
    """An adapter's directory with another config than ours."""
    (directory / PEFT_CONFIG).write_text(json.dumps(peft_config(MODEL, ["q_proj"]) | fields))
    return directory


def test_an_adapter_of_ours_is_one_to_start_from(tmp_path: Path) -> None:
    assert problems(saved(tmp_path)) == []


def test_fields_that_older_versions_did_not_write_may_be_absent(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "alpha_pattern": None}
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(config))
    assert problems(tmp_path, ModelArguments(lora_rank=8)) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"r": 16}, "has r 16, expected 8: change --lora-rank"),
        ({"lora_alpha": 16}, "has lora_alpha 16, expected 32: change --lora-alpha"),
        ({"use_dora": False}, "has use_dora False, expected True: change --lora-type"),
        ({"use_rslora": True}, "has use_rslora True, expected False: merge the adapter into --hf-checkpoint"),
        ({"bias": "all"}, "has bias all, expected none: merge"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern {'q_proj': 2}, expected {}: merge"),
        ({"peft_type": "IA3"}, "expected peft_type LORA, found IA3"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    (problem,) = problems(saved(tmp_path, **fields))
    assert expected in problem


def test_peft_leaves_the_layers_of_a_vision_tower_alone() -> None:
    assert peft_config(MODEL, ["down_proj"])["exclude_modules"] is None
    excluded = peft_config(MODEL, ["down_proj"], images=True)["exclude_modules"]
    assert re.fullmatch(excluded, "model.visual.blocks.0.mlp.down_proj")
    assert not re.fullmatch(excluded, "model.language_model.layers.0.mlp.down_proj")


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_directory_without_a_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / PEFT_CONFIG).write_text(text)
    (problem,) = problems(tmp_path)
    assert f"--lora-adapter-path {tmp_path}: cannot read adapter_config.json" in problem
