"""SGLang's decisions for each preset (docs/sglang_choices.tsv) next to those of the recipe it was compared with.

Flags are those of slime at 624b824a and miles at 31f1ca96, of August 2026, as their scripts give them for H100.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_async.arguments.argument_files import presets
from tests.unit.arguments.test_model_presets import MODELS

ROOT = Path(__file__).parents[3]

QWEN3_4B = "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7"
QWEN3_30B = (
    "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)"
)
QWEN35_27B = (
    "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.75 --sglang-speculative-algorithm EAGLE"
    " --sglang-mamba-scheduler-strategy extra_buffer"
)
GEO3K = (
    "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.6 --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)"
)
GPT_OSS = "--rollout-num-gpus-per-engine 4 --sglang-dtype bfloat16 --sglang-mem-fraction-static 0.70"
GEMMA_4 = (
    " --sglang-attention-backend triton --sglang-disable-custom-all-reduce --sglang-disable-cuda-graph"
    " --sglang-disable-overlap-schedule --sglang-disable-radix-cache"
)
GROUPS = "--sglang-enable-dp-attention --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1"
SPECULATES = "--sglang-speculative-algorithm EAGLE"
DEEPEP = "--sglang-moe-a2a-backend deepep --sglang-deepep-mode auto"

RECIPES: Mapping[str, tuple[str, str]] = {
    "deepseek-v3": (
        "slime, scripts/run-deepseek-r1.sh",
        "--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7 --sglang-ep-size 64 --sglang-dp-size 8"
        f" {GROUPS} {DEEPEP} {SPECULATES}",
    ),
    "deepseek-v3.2": (
        "miles, scripts/run_deepseek_v32.py",
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.8 --sglang-attention-backend nsa"
        " --sglang-page-size 64 --sglang-moe-runner-backend triton --sglang-dp-size 8 --sglang-cuda-graph-max-bs 256"
        " --sglang-enable-dp-attention --sglang-enable-dp-lm-head",
    ),
    "gemma-4-26b-a4b": (
        "miles, scripts/run_gemma_4_26b_a4b.py",
        "--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.55 --sglang-moe-runner-backend triton"
        + GEMMA_4,
    ),
    "gemma-4-31b": (
        "miles, scripts/run_gemma_4_31b.py",
        "--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.5" + GEMMA_4,
    ),
    "glm-4.5": (
        "slime, scripts/run-glm4.7-355B-A32B.sh",
        "--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-ep-size 32 --sglang-dp-size 4"
        f" {GROUPS} {SPECULATES}",
    ),
    "glm-4.7-flash": (
        "slime, scripts/run-glm4.7-30B-A3B.sh",
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.8 --sglang-dp-size 8"
        f" --sglang-cuda-graph-max-bs 64 --sglang-max-running-requests 512 {GROUPS} {SPECULATES}",
    ),
    "glm-5": (
        "slime, scripts/run-glm5-744B-A40B.sh",
        "--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.70 --sglang-ep-size 64 --sglang-dp-size 64"
        " --sglang-page-size 64 --sglang-attention-backend nsa --sglang-cuda-graph-max-bs 8"
        f" --sglang-max-running-requests 512 --sglang-chunked-prefill-size 131072 {GROUPS} {DEEPEP} {SPECULATES}",
    ),
    "gpt-oss-120b": ("that of gpt-oss-20b", GPT_OSS),
    "gpt-oss-20b": ("miles, scripts/run_gpt_oss_20b.py", GPT_OSS),
    "kimi-k2": (
        "slime, scripts/run-kimi-k2-Instruct.sh",
        "--rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.7 --sglang-ep-size 16 --sglang-dp-size 8"
        f" {GROUPS}",
    ),
    "llama-3.1-8b": ("slime, scripts/run-qwen3-4B.sh", QWEN3_4B),
    "minimax-m2": (
        "slime, scripts/run-minimax-m2.sh",
        "--rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.7 --sglang-ep-size 16"
        " --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)",
    ),
    "nemotron-3-nano-30b-a3b": (
        "miles, scripts/run_nemotron_3_nano.py",
        "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7",
    ),
    "qwen2.5-vl-7b": ("miles, examples/geo3k_vlm/run_geo3k_vlm.sh", GEO3K),
    "qwen3-235b-a22b": (
        "slime, scripts/run-qwen3-235B-A22B.sh",
        "--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-ep-size 32 --sglang-dp-size 4"
        " --sglang-enable-dp-attention --sglang-enable-dp-lm-head --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)"
        f" {DEEPEP}",
    ),
    "qwen3-30b-a3b": ("slime, scripts/run-qwen3-30B-A3B.sh", QWEN3_30B),
    "qwen3-30b-a3b-offload": ("slime, scripts/run-qwen3-30B-A3B.sh", QWEN3_30B),
    "qwen3-32b": ("slime, scripts/run-qwen3-32B.sh", QWEN3_30B),
    "qwen3-4b": ("slime, scripts/run-qwen3-4B.sh", QWEN3_4B),
    "qwen3-8b": ("slime, scripts/run-qwen3-4B.sh", QWEN3_4B),
    "qwen3-next-80b-a3b": (
        "slime, scripts/run-qwen3-next-80B-A3B.sh",
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.8 --sglang-ep-size 8"
        f" --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 128) --sglang-max-running-requests 256 {SPECULATES}",
    ),
    "qwen3-vl-30b-a3b": ("miles, examples/geo3k_vlm/run_geo3k_vlm.sh", GEO3K),
    "qwen3-vl-8b": ("miles, examples/geo3k_vlm/run_geo3k_vlm.sh", GEO3K),
    "qwen3.5-27b": ("slime, scripts/run-qwen3.5-27B.sh", QWEN35_27B),
    "qwen3.5-35b-a3b": (
        "slime, examples/geo3k_vlm/run_geo3k_qwen35.sh",
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-ep-size 8"
        f" --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256) --sglang-max-running-requests 512 {SPECULATES}",
    ),
    "qwen3.5-9b": ("slime, scripts/run-qwen3.5-27B.sh", QWEN35_27B),
}
"""Preset → script, and the flags by which it starts engines: those on which the file's columns depend, or that have
none there.
"""


def rows() -> dict[str, dict[str, str]]:
    names, *cells = [line.split("\t") for line in (ROOT / "docs/sglang_choices.tsv").read_text().splitlines()]
    return {row[0].partition(",")[0]: dict(zip(names, row, strict=True)) for row in cells}


def given(flags: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in shlex.split(flags):
        if word.startswith("--"):
            values = found.setdefault(word.removeprefix("--sglang-").removeprefix("--"), [])
        else:
            values.append(word.rstrip(")"))
    return found


def recipe(flags: str) -> dict[str, str]:
    """A recipe's flags as cells of the file; no cell where SGLang decides as it does for us."""
    words = {name: values[-1] if values else "" for name, values in given(flags).items()}
    groups = words.get("dp-size", "1")
    cells = {
        "TP": words["rollout-num-gpus-per-engine"],
        "EP": words.get("ep-size", "1"),
        "groups": groups,
        "memory fraction": f"{float(words['mem-fraction-static']):g}",
    }
    if "attention-backend" in words:
        cells["attention"] = words["attention-backend"].replace("nsa", "dsa")  # SGLang's older name
    if "moe-runner-backend" in words:
        cells["experts"] = words["moe-runner-backend"]
    if "page-size" in words:
        cells["page"] = words["page-size"]
    if "chunked-prefill-size" in words:
        cells["prefill chunk"] = str(int(words["chunked-prefill-size"]) // int(groups))
    if "disable-cuda-graph" in words:
        cells["decode graphs"] = cells["prefill graphs"] = "disabled"
    if largest := words.get("cuda-graph-bs", words.get("cuda-graph-max-bs")):
        cells["decode graphs"] = f"full, {largest}"
    if "disable-overlap-schedule" in words:
        cells["overlap"] = "off"
    if "mamba-scheduler-strategy" in words:
        cells["states of linear attention"] = words["mamba-scheduler-strategy"]
    return cells


def differences(ours: Mapping[str, str], flags: str) -> str:
    found = [f"{name} {cell}" for name, cell in recipe(flags).items() if cell != ours[name]]
    words = given(flags)
    found += ["DeepEP"] if "moe-a2a-backend" in words else []
    found += ["speculation"] if "speculative-algorithm" in words else []
    return "; ".join(found)


def test_every_preset_has_a_recipe() -> None:
    assert sorted(RECIPES) == sorted(MODELS)


@pytest.mark.parametrize("preset", MODELS)
def test_the_recipe_is_the_one_that_the_preset_names(preset: str) -> None:
    compared = presets()[preset].read_text().splitlines()[1]
    assert f"# Compared with {RECIPES[preset][0]}".rstrip(".") in compared


@pytest.mark.parametrize("preset", MODELS)
def test_the_file_says_what_the_recipe_decides_otherwise(preset: str) -> None:
    ours = rows()[preset]
    assert ours["its recipe"] == differences(ours, RECIPES[preset][1])


def test_a_difference_is_seen() -> None:
    ours = rows()["qwen3-4b"]
    assert differences(ours, "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.828") == ""
    flags = "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.9 --sglang-page-size 64 " + SPECULATES
    assert differences(ours, flags) == "memory fraction 0.9; page 64; speculation"
