"""Layers for multi-token prediction against a plain reference: loss, gradient, two optimizer steps, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.memory.plan import measure
from miles_async.backends.megatron.memory.stages import StageRequest
from miles_async.errors import CheckpointError
from tests.integration.megatron_scenario import LR, Layout, make_backend, moving, rollout_steps, shard_of
from tests.integration.plain_ahead_layers import PlainAheadTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny, save_with_ahead_layers
from tests.integration.toy_batches import ToySample, to_shards

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FACTOR = 0.2
AHEAD = {"enable_mtp_training": True, "mtp_loss_scaling_factor": FACTOR}
CASES = {
    "glm4-moe": ("glm4-moe", 1, Layout(micro_batches=2, model=AHEAD)),
    "glm4-moe-pp2": ("glm4-moe", 1, Layout(2, pipeline=2, micro_batches=2, model=AHEAD)),
    "deepseek-v3": ("deepseek-v3", 1, Layout(model=AHEAD)),
    "glm4-moe-lite": ("glm4-moe-lite", 1, Layout(model=AHEAD)),
    "deepseek-v3-tp2-ep2": ("deepseek-v3", 1, Layout(2, tensor=2, expert=2, expert_tensor=1, model=AHEAD)),
    "glm4-moe-tp2-pp2": ("glm4-moe", 1, Layout(4, tensor=2, pipeline=2, micro_batches=2, model=AHEAD)),
    "glm4-moe-dp2-two-layers-recomputed": (
        "glm4-moe", 2, Layout(2, model={**AHEAD, "recompute_granularity": "full"}),
    ),
}  # fmt: skip
AT_ONCE = ("glm4-moe-lite", "glm4-moe-pp2")


class Observed(NamedTuple):
    published: list[str]  # names
    alone: dict[str, float]  # metrics of a step whose advantages are all 0
    moved: list[str]  # published tensors that it changed
    steps: dict[str, float]  # metrics of two optimizer steps


def rollouts() -> tuple[list[ToySample], list[list[ToySample]]]:
    """An optimizer step without advantages, and two with."""
    first, second, _ = rollout_steps(2)
    return [dataclasses.replace(sample, advantage=0.0) for step in first for sample in step], second


def observe(rank: int, world_size: int, store: dist.Store, directory: Path, layout: Layout, target: Path) -> Observed:
    backend = make_backend(rank, world_size, store, directory, layout)

    without_advantages, two_steps = rollouts()
    published = [name for name, _ in backend.export_weights()]
    with moving(backend) as moved:
        alone = backend.train(shard_of(backend, [without_advantages], layout.micro_batches))
    steps = backend.train(shard_of(backend, two_steps, layout.micro_batches))
    backend.save_hf(target)
    backend.close()
    return Observed(published, alone, moved, steps)


@pytest.mark.long
def test_memory_counts_these_layers(tmp_path: Path) -> None:
    directory, _ = save_with_ahead_layers("deepseek-v3", tmp_path)
    model = ModelArguments(pipeline_model_parallel_size=2, bf16=False, **AHEAD)
    *_, last = measure(
        StageRequest(
            directory=directory,
            model=model,
            world_size=2,
            tokens=128,
            logprob_chunk=64,
            temperature=1.0,
            entropy=False,
        )
    )[model.recompute_granularity]
    copies = ("embed_tokens.weight", "shared_head.head.weight", "correction_bias")  # the last one is no parameter
    sizes = {
        name: tensor.numel()
        for name, tensor in load_file(directory / "model.safetensors").items()
        if ".layers.2." in name and not name.endswith(copies)
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert (last.ahead, last.expert_ahead) == (sum(sizes.values()) - experts, experts)
    assert last.peak > last.kept > 0


def publish_and_save(rank: int, world_size: int, store: dist.Store, directory: Path, target: Path) -> list[str]:
    backend = make_backend(rank, world_size, store, directory, Layout())
    published = [name for name, _ in backend.export_weights()]
    backend.save_hf(target)
    backend.close()
    return published


def test_layers_with_names_of_their_own_are_copied(tmp_path: Path) -> None:
    """Those of Qwen3-Next and Qwen3.5 have no number after the model's, but begin with ``mtp.``."""
    directory = save_tiny("qwen3-next", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    own = {"mtp.fc.weight": torch.randn(64, 128), "mtp.layers.0.input_layernorm.weight": torch.randn(64)}
    save_file(tensors | own, directory / "model.safetensors")
    [published] = run_ranks(1, publish_and_save, directory, tmp_path / "saved")
    assert set(published) == set(tensors)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(tensors | own)
    for name, tensor in own.items():
        assert torch.equal(saved[name], tensor)


def save_and_load(rank: int, world_size: int, store: dist.Store, directory: Path, target: Path) -> str:
    """The refusal of a checkpoint by a run that does not train these layers."""
    saving, loading = Layout(2, pipeline=2, model=AHEAD), Layout(2, tensor=2, model=AHEAD)
    backend = make_backend(rank, world_size, dist.PrefixStore("save", store), directory, saving)
    shards = to_shards(rollouts()[1], dp_size=1, micro_batches=1)
    backend.train(shards[0])
    backend.save(target / "checkpoint")
    backend.save_hf(target / "saved")
    backend.close()
    backend = make_backend(rank, world_size, dist.PrefixStore("load", store), directory, loading)
    backend.load(target / "checkpoint")
    backend.save_hf(target / "loaded")
    backend.close()
    backend = make_backend(rank, world_size, dist.PrefixStore("refuse", store), directory, Layout(2, tensor=2))
    try:
        backend.load(target / "checkpoint")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_a_checkpoint_of_these_layers_is_loaded_in_another_layout(tmp_path: Path) -> None:
    directory, _ = save_with_ahead_layers("glm4-moe", tmp_path)
    for refusal in run_ranks(2, save_and_load, directory, tmp_path, timeout=200):
        assert "it holds trained layers for multi-token prediction: give --enable-mtp-training" in refusal
    saved, loaded = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "loaded"))
    assert [name for name in saved if not saved[name].equal(loaded[name])] == []


@pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_layers_for_multi_token_prediction_equal_a_plain_reference(name: str, tmp_path: Path) -> None:
    family, count, layout = CASES[name]
    directory, deep = save_with_ahead_layers(family, tmp_path, count=count)
    ranks = run_ranks(layout.world_size, observe, directory, layout, tmp_path / "saved", timeout=200)
    plain = PlainAheadTrainer(directory, deep, lr=LR, factor=FACTOR)
    start = plain.tensors(tmp_path / "start")
    without_advantages, two_steps = rollouts()
    alone, steps = plain.train([without_advantages]), plain.train(two_steps)
    reference, saved = plain.tensors(tmp_path / "reference"), load_file(tmp_path / "saved" / "model.safetensors")

    for rank in ranks:
        assert rank.moved == [], "the policy gets no gradient from them"
        assert not [tensor for tensor in rank.published if ".layers.2." in tensor], "engines don't hold them"
        for ours, theirs in ((rank.alone, alone), (rank.steps, steps)):
            assert ours["mtp_loss"] == pytest.approx(theirs["mtp_loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert set(saved) == set(load_file(directory / "model.safetensors"))
    for tensor, value in reference.items():
        difference, step = (saved[tensor] - value).norm(), (value - start[tensor]).norm()
        assert difference <= 0.02 * step + 1e-6, f"{tensor} differs by {difference:.2g}, moved by {step:.2g}"
    for layer in range(2, 2 + count):
        assert saved[f"model.layers.{layer}.embed_tokens.weight"].equal(saved["model.embed_tokens.weight"])
        assert saved[f"model.layers.{layer}.shared_head.head.weight"].equal(saved["lm_head.weight"])
    assert not torch.equal(saved["model.layers.2.eh_proj.weight"], start["model.layers.2.eh_proj.weight"].float())
