"""Fields of Megatron's configs beside other flags: what it refuses in every rank is refused at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments.megatron_settings import check_megatron_fields
from miles_async.arguments.parser import parse_arguments

PIPELINE = "--pipeline-model-parallel-size 2"
RECOMPUTES = "--recompute-granularity full"
OFFLOADS = "--cpu-offloading --cpu-offloading-num-layers"
DISTRIBUTES = "--distribute-saved-activations --recompute-granularity full --tensor-model-parallel-size 2"


def problems(directory: Path, words: str) -> list[str]:
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    return list(check_megatron_fields(parse_arguments([*words.split(), "--hf-checkpoint", str(directory)]).arguments))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{OFFLOADS} 1 {PIPELINE}", f"--megatron-cpu-offloading with {PIPELINE}"),
        (f"{OFFLOADS} 1 {RECOMPUTES}", f"--megatron-cpu-offloading with {RECOMPUTES}"),
        (f"{OFFLOADS} 4", "--megatron-cpu-offloading with --megatron-cpu-offloading-num-layers 4 of 4 layers"),
        (DISTRIBUTES, f"--megatron-distribute-saved-activations with {RECOMPUTES} and --sequence-parallel"),
        (
            "--defer-embedding-wgrad-compute",
            "--megatron-defer-embedding-wgrad-compute with --pipeline-model-parallel-size 1",
        ),
        ("--exp-avg-dtype bf16", "--megatron-exp-avg-dtype bf16: Megatron needs --use-precision-aware-optimizer"),
        ("--optimizer-cpu-offload --save here", "--megatron-optimizer-cpu-offload with --save"),
        (
            "--use-precision-aware-optimizer --store-param-remainders --save here",
            "--megatron-store-param-remainders with --save",
        ),
    ],
)
def test_fields_that_megatron_refuses_beside_other_flags(tmp_path: Path, words: str, message: str) -> None:
    # covers: C12
    (found,) = problems(tmp_path, words)
    assert found.startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        f"{OFFLOADS} 3",
        f"--no-cpu-offloading {PIPELINE}",
        f"{DISTRIBUTES} --no-sequence-parallel",
        f"--defer-embedding-wgrad-compute {PIPELINE}",
        "--use-precision-aware-optimizer --exp-avg-dtype bf16",
        "--exp-avg-dtype fp32",
        "--optimizer-cpu-offload",
        "--optimizer-cpu-offload --use-precision-aware-optimizer --save here",
        "--use-precision-aware-optimizer --store-param-remainders",
    ],
)
def test_fields_that_megatron_takes(tmp_path: Path, words: str) -> None:
    assert problems(tmp_path, words) == []
