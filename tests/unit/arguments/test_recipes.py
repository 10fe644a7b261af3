"""Real recipes of slime and miles as they are: what happens to each of their flags, and to the whole of them.

tests/recipes holds the flags and values of nine scripts, and config.json of their models.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from examples.quickstart.tokenizer import build_tokenizer
from miles_async.arguments.argument_files import expand_argument_files
from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.parser import build_parser
from miles_async.arguments.pass_through import is_pass_through
from miles_async.arguments.words import looks_like_flag
from miles_async.cli import main
from miles_async.machine.gpus import GpuFacts

RECIPES = Path(__file__).parents[2] / "recipes"
PATHS = {"--hf-checkpoint", "--ref-load", "--load", "--save", "--prompt-data", "--eval-prompt-data", "--dump-details"}
CLUSTER = {
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus", "--num-gpus-per-node", "--colocate")
}

# Recipe → (model, GPUs that train).
EXPECTED = {
    "S1_qwen3-4b": ("Qwen3-4B", 8),
    "S2_qwen3-30b-a3b": ("Qwen3-30B-A3B", 8),
    "S3_glm4-9b": ("GLM-Z1-9B-0414", 4),
    "S4_qwen3-235b-a22b": ("Qwen3-235B-A22B", 64),
    "S5_deepseek-r1": ("DeepSeek-R1", 128),
    "S6_glm47-355b-a32b": ("GLM-4.7-355B-A32B", 64),
    "M1_qwen3-4b": ("Qwen3-4B", 8),
    "M2_qwen3-30b-a3b": ("Qwen3-30B-A3B", 8),
    "M3_glm45-355b-a32b": ("GLM-4.5", 16),
}


def without(words: Sequence[str], flags: set[str]) -> list[str]:
    """``words`` less these flags and their values."""
    kept, dropping = [], False
    for word in words:
        if looks_like_flag(word):
            dropping = word in flags
        if not dropping:
            kept.append(word)
    return kept


def recipe(name: str) -> list[str]:
    """Everything that a script gives but paths and cluster."""
    return without(expand_argument_files([f"@{RECIPES / name}.args"]), PATHS | CLUSTER)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Path) -> list[str]:
    """The lines that a user changes: his paths, his cluster, and how old data may be."""
    model, gpus = EXPECTED[request.node.callspec.params["name"]]
    directory = tmp_path / "model"
    shutil.copytree(tokenizer, directory)
    shutil.copyfile(RECIPES / "configs" / f"{model}.json", directory / "config.json")
    save_file({}, directory / "model.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [{"role": "user", "content": "rev 12"}], "label": "21"}\n')
    return shlex.split(
        f"--hf-checkpoint {directory} --prompt-data {prompts} --eval-prompt-data aime {prompts} --save {tmp_path}/save "
        f"--run-dir {tmp_path}/run --device cpu --actor-num-gpus-per-node {gpus} --rollout-num-gpus {gpus} "
        "--max-weight-staleness 2"
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_dry_run_ends_in_order(name: str, own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # covers: P8
    words = recipe(name)
    correction = [] if "--use-tis" in words else ["--use-rollout-logprobs"]
    status = main(["train", *words, *own, *correction, "--dry-run"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "are in order" in shown.out
    assert "note: --balance-data changes nothing: tokens always are balanced" in shown.out
    deepep = "note: --moe-enable-deepep changes nothing: tokens reach experts by alltoall"
    assert (deepep in shown.out) is ("--moe-enable-deepep" in words)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 512 GPUs, with the packages that are there; what ranks take is not measured."""
    node = GpuFacts(driver="580.65.06", cuda="13.0", gpus=("NVIDIA H100",) * 512, nccl="2.28.9")
    monkeypatch.setattr("miles_async.machine.checks.gpu_facts", lambda: node)
    monkeypatch.setattr("miles_async.machine.checks.package_findings", lambda versions, device: [])
    monkeypatch.setattr("miles_async.machine.checks.shared_memory_findings", lambda device: [])
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: len(node.gpus))
    monkeypatch.setattr("miles_async.runs.memory.memory_report", lambda arguments: "memory of ranks\n")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("name", EXPECTED)
def test_dry_run_on_gpus_ends_in_the_same_way(name: str, own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # covers: P8
    words = recipe(name)
    correction = [] if "--use-tis" in words else ["--use-rollout-logprobs"]
    status = main(["train", *words, *own, "--device", "cuda", *correction, "--dry-run"])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "ranks on cuda" in shown.out
    assert "Transformer Engine chooses (auto)" in shown.out  # every recipe asks for flash-attn, which is not there
    assert shown.out.endswith("memory of ranks\n")


@pytest.mark.parametrize("name", ["S6_glm47-355b-a32b"])
def test_a_longer_sample_than_a_micro_batch_is_a_note_but_ends_trajectories(
    name: str, own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*recipe(name), *own, "--dry-run"]
    assert main(["train", *words]) == 0
    note = "with --rollout-max-response-len 32768 samples of any prompt may exceed --max-tokens-per-gpu 32768, and then"
    assert note in capsys.readouterr().out
    assert main(["train", *words, "--agent-command", "python agent.py"]) == 2
    problem = "--max-tokens-per-gpu 16384 on each of 2 context-parallel ranks cannot hold the longest"
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("file", "count"), [("flags", 193), ("argument_files", 395)])
def test_every_flag_of_the_recipes_and_of_their_argument_files_is_known(file: str, count: int) -> None:
    """Ours, passed on, a field of Megatron's, or in the table."""
    # covers: P8
    ours = list(build_parser("miles-async train")._option_string_actions)
    flags = [line for line in (RECIPES / f"{file}.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(flags) == count
    unknown = [
        flag
        for flag in flags
        if flag not in ours
        and flag not in FOREIGN_FLAGS
        and not (is_pass_through(flag, ours) and not flag.startswith("--megatron-"))
        and next(as_megatron_flags([flag], ours)) == flag
    ]
    assert not unknown
