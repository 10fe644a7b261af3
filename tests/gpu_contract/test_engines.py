"""SGLang takes the commands of the presets, decides what sglang_choices.tsv says, and has what the launcher patches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_async.engines.sglang.server import server_command, server_environment
from tests.gpu_contract.conftest import LIMIT, ROOT, Program
from tests.gpu_contract.engines import SERVER, spec_of

CHOICES = ROOT / "docs" / "sglang_choices.tsv"

pytestmark = pytest.mark.timeout(1300)


@pytest.fixture(scope="module")
def engines(program: Program) -> Any:
    return program("engines")


def test_hooks_find_their_functions(engines: Any) -> None:
    assert engines["hooks"] == []


def test_the_file_says_what_sglang_decides(engines: Any) -> None:
    rows = [line.rpartition("\t")[0] for line in CHOICES.read_text().splitlines()[1:]]  # the last column is no decision
    assert rows == engines["rows"], "\n".join([f"expected in {CHOICES.name}:", *engines["rows"]])


def test_sglang_takes_published_float8_for_float8(engines: Any) -> None:
    found = engines["quantizations"]
    assert {"deepseek-v3", "glm-4.5", "minimax-m2", "qwen3-4b", "qwen3-30b-a3b"} <= found.keys()
    assert set(found.values()) == {"fp8"}


def test_a_server_starts_up_to_the_first_use_of_a_device(
    environment: Callable[[bool], dict[str, str]], tmp_path: Path
) -> None:
    spec = spec_of("qwen3-4b", "Qwen3-0.6B", tmp_path)
    spec = msgspec.structs.replace(spec, extra=("--skip-tokenizer-init",))  # there is a config.json only
    command = [sys.executable, *server_command(spec, *SERVER)]
    variables = environment(True) | server_environment(spec)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert "in set_device" in done.stderr, done.stderr[-4000:]
    assert "Found no NVIDIA driver" in done.stderr, done.stderr[-4000:]
