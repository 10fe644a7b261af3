"""Vision-language models in the trainer: log-probs, losses, gradients and exports are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.model import ModelArguments, num_experts
from miles_async.arguments.model_files import count_elements, directory_problems, read_config
from miles_async.backends.megatron.memory.plan import measure
from miles_async.backends.megatron.memory.stages import StageRequest
from tests.integration.megatron_scenario import LR, Layout, export_differences, make_backend
from tests.integration.rank_processes import run_ranks
from tests.integration.toy_batches import to_shards
from tests.integration.vision_models import CONFIGS, PlainVisionTrainer, cases, save_tiny_vision, vision_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

Seen = dict[str, Any]
STEPS = tuple(tuple(vision_samples(6, seed=seed)) for seed in range(2))


MODELS = [  # published mixtures are untied
    pytest.param(
        (name, tied),
        marks=[] if tied is ("moe" not in name) else [pytest.mark.long],
        id=f"{name}-{'tied' if tied else 'untied'}",
    )
    for name in CONFIGS
    for tied in (True, False)
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, tied = request.param
    return save_tiny_vision(tmp_path_factory.mktemp("model") / name, name, tied=tied)


@pytest.fixture(scope="module")
def seen(model: Path) -> Seen:
    return run_ranks(1, _observe, model)[0]


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainVisionTrainer:
    trainer = PlainVisionTrainer(model, lr=LR)
    known = [*cases(), *((sample.tokens.tolist(), sample.pictures) for step in STEPS for sample in step)]
    trainer.pictures = {tuple(tokens): pictures for tokens, pictures in known}
    return trainer


def _observe(rank: int, world_size: int, store: dist.Store, model: Path) -> Seen:
    """In the rank."""
    backend = make_backend(rank, world_size, store, model, Layout())
    sequences, pictures = [list(each) for each in zip(*cases(), strict=True)]
    seen: Seen = {
        "packed": backend.logprobs(sequences, pictures=pictures),
        "alone": [backend.logprobs([each], pictures=[own])[0] for each, own in cases()],
        "export": export_differences(backend, model),
    }
    before = {name: tensor.clone() for name, tensor in backend.export_weights()}
    seen["steps"] = [backend.train(to_shards([step], dp_size=1, micro_batches=3)[0]) for step in STEPS]
    seen["still"] = [name for name, tensor in backend.export_weights() if tensor.equal(before[name])]
    seen["after"] = backend.logprobs(sequences, pictures=pictures)
    backend.close()

    frozen = Layout(model={"freeze_vision_tower": True})
    backend = make_backend(rank, world_size, dist.PrefixStore("frozen", store), model, frozen)
    backend.train(to_shards([STEPS[0]], dp_size=1, micro_batches=3)[0])
    seen["frozen"] = [name for name, tensor in backend.export_weights() if tensor.equal(before[name])]
    backend.close()

    supervised = AlgorithmArguments(loss_type="sft_loss")
    backend = make_backend(rank, world_size, dist.PrefixStore("sft", store), model, Layout(), supervised)
    seen["supervised"] = backend.train(to_shards([STEPS[0]], dp_size=1, micro_batches=3)[0])
    backend.close()
    return seen


def test_logprobs_are_those_of_transformers(seen: Seen, plain: PlainVisionTrainer):
    with torch.no_grad():
        expected = [plain.logprobs(tokens, plain.initial).tolist() for tokens, _ in cases()]
    for packed, alone, reference in zip(seen["packed"], seen["alone"], expected, strict=True):
        np.testing.assert_allclose(packed, reference, atol=2e-5)
        np.testing.assert_allclose(alone, reference, atol=2e-5)


def test_the_export_is_the_checkpoint(seen: Seen):
    assert seen["export"] == []


def test_training_is_that_of_transformers(seen: Seen, plain: PlainVisionTrainer):
    for metrics, step in zip(seen["steps"], STEPS, strict=True):
        reference = plain.train([step])
        assert metrics["loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    with torch.no_grad():
        expected = [plain.logprobs(tokens).tolist() for tokens, _ in cases()]
    for after, reference in zip(seen["after"], expected, strict=True):
        np.testing.assert_allclose(after, reference, atol=1e-3)


def test_answers_about_images_are_learned_as_in_transformers(seen: Seen, plain: PlainVisionTrainer):
    with torch.no_grad():
        logprobs = torch.cat([plain.logprobs(sample.tokens, plain.initial) for sample in STEPS[0]])
    learned = torch.cat([torch.tensor(sample.loss_mask[1:]) for sample in STEPS[0]]) == 1
    assert seen["supervised"]["loss"] == pytest.approx(-float(logprobs[learned].mean()), rel=1e-4)


def test_the_vision_tower_is_trained(seen: Seen):
    assert seen["still"] == []


def test_the_vision_tower_can_be_left_as_it_is(seen: Seen, model: Path):
    names = [name for file in model.glob("*.safetensors") for name in load_file(file)]
    assert sorted(seen["frozen"]) == sorted(name for name in names if "visual." in name)


def _train_on_shards(rank: int, world_size: int, store: dist.Store, model: Path, folder: Path, expert: int) -> Seen:
    """In one of two data-parallel ranks, of which the second has no images; and what is saved there. ``expert``:
    ranks over which experts are split.
    """
    layout = Layout(world_size, expert=expert)
    backend = make_backend(rank, world_size, store, model, layout, recompute="full")
    metrics = backend.train(to_shards([WITH_TEXT_RANK], dp_size=2, micro_batches=2)[rank])
    backend.save(folder / "checkpoint")
    backend.save_hf(folder / "hf")
    sequences, pictures = [list(each) for each in zip(*cases(), strict=True)]
    seen: Seen = {"step": metrics, "after": backend.logprobs(sequences, pictures=pictures)}
    backend.close()
    resumed = make_backend(rank, world_size, dist.PrefixStore("resumed", store), model, layout)
    resumed.load(folder / "checkpoint")
    seen["resumed"] = resumed.logprobs(sequences, pictures=pictures)
    resumed.close()
    return seen


WITH_TEXT_RANK = [STEPS[0][index] for index in (1, 0, 2, 3)]  # images are at even places


def test_data_parallel_ranks_train_as_one_and_keep_all_of_it(
    model: Path, plain: PlainVisionTrainer, tmp_path: Path
) -> None:
    """Also where they split experts."""
    reference = PlainVisionTrainer(model, lr=LR)
    reference.pictures = plain.pictures
    expected = reference.train([WITH_TEXT_RANK])
    for expert in (1, 2) if num_experts(read_config(model)) else (1,):
        folder = tmp_path / str(expert)
        seen, other = run_ranks(2, _train_on_shards, model, folder, expert)
        assert seen["step"]["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
        assert seen["step"]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert seen["resumed"] == seen["after"] == other["after"]
        assert not list(directory_problems(folder / "hf", "--hf-checkpoint"))
        exported = PlainVisionTrainer(folder / "hf", lr=LR)  # with its own processor
        exported.pictures = plain.pictures
        with torch.no_grad():
            for (tokens, _), after in zip(cases(), seen["after"], strict=True):
                np.testing.assert_allclose(after, exported.logprobs(tokens).tolist(), atol=2e-5)
                np.testing.assert_allclose(after, reference.logprobs(tokens).tolist(), atol=1e-3)


def test_memory_is_planned_with_the_vision_tower(model: Path) -> None:
    request = StageRequest(
        directory=model,
        model=ModelArguments(hf_checkpoint=model),
        world_size=1,
        tokens=64,
        logprob_chunk=16,
        temperature=1.0,
        entropy=False,
    )
    [stage] = measure(request)[None]
    assert stage.parameters + stage.expert_parameters == count_elements(model)
