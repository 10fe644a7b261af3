"""Vision-language models in the trainer: log-probs, losses, gradients and exports are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _pytest.mark.structures import ParameterSet
from safetensors.torch import load_file

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import count_elements, directory_problems
from miles_async.backends.megatron.memory.plan import model_parameters
from miles_async.backends.megatron.memory.stages import StageRequest
from miles_async.errors import CheckpointError
from tests.integration.family_table import COMPARED_WITH_IMAGES, EVERY_DAY_WITH_IMAGES
from tests.integration.megatron_scenario import LR, Layout, export_differences, make_backend, shard_of
from tests.integration.rank_processes import run_ranks
from tests.integration.test_megatron_layouts import LAYOUTS
from tests.integration.test_memory_plan import measure_here
from tests.integration.toy_batches import to_shards
from tests.integration.vision_models import (
    CONFIGS,
    PlainVisionTrainer,
    cases,
    pictures_by_tokens,
    save_tiny_vision,
    vision_samples,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

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
    trainer.pictures = pictures_by_tokens(sample for step in STEPS for sample in step)
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
    backend.save(model.parent / "frozen")
    backend.load(model.parent / "frozen")
    backend.close()

    supervised = AlgorithmArguments(loss_type="sft_loss")
    backend = make_backend(rank, world_size, dist.PrefixStore("sft", store), model, Layout(), supervised)
    with pytest.raises(CheckpointError) as caught:
        backend.load(model.parent / "frozen")
    seen["unfrozen"] = str(caught.value)
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


def test_a_checkpoint_without_the_towers_optimizer_state_says_so(seen: Seen):
    assert "its run did not train the vision tower: give --freeze-vision-tower" in seen["unfrozen"]


WITH_TEXT_RANK = [STEPS[0][index] for index in (1, 0, 2, 3)]  # images are at even places


def _observe_split(
    rank: int, world_size: int, store: dist.Store, models: dict[str, Path], layout: Layout
) -> dict[str, Seen]:
    """In a rank of ``layout``, and what it saves next to each model. Of two data-parallel ranks the second one has no
    images.
    """
    sequences, pictures = [list(each) for each in zip(*cases(), strict=True)]
    found = {}
    for name, model in models.items():
        backend = make_backend(rank, world_size, dist.PrefixStore(name, store), model, layout, recompute="full")
        seen: Seen = {"before": backend.logprobs(sequences, pictures=pictures)}
        seen["export"] = export_differences(backend, model)
        named = [each for learner in backend._learners.values() for each in learner.model.modules[0].named_parameters()]
        tower = {each: tensor for each, tensor in named if "visual." in each}
        for tensor in tower.values():  # as ranks' kernels may round differently
            tensor.register_hook(lambda gradient: gradient * (1 + 1e-6 * rank))
        seen["step"] = backend.train(shard_of(backend, [WITH_TEXT_RANK], 2))
        seen["tower"] = {each: tensor.detach().numpy().tobytes() for each, tensor in tower.items()}
        backend.save(model.parent / f"{name}-checkpoint")
        backend.save_hf(model.parent / f"{name}-hf")
        seen["after"] = backend.logprobs(sequences, pictures=pictures)
        backend.close()
        resumed = make_backend(rank, world_size, dist.PrefixStore(f"{name}-resumed", store), model, layout)
        resumed.load(model.parent / f"{name}-checkpoint")
        seen["resumed"] = resumed.logprobs(sequences, pictures=pictures)
        resumed.close()
        found[name] = seen
    return found


def _split_cases() -> Iterator[ParameterSet]:
    """One set of processes observes all models of a layout."""
    for layout, names in COMPARED_WITH_IMAGES.items():
        daily = EVERY_DAY_WITH_IMAGES.get(layout, ())
        for some, marks in ((daily, ()), (tuple(name for name in names if name not in daily), pytest.mark.long)):
            if some and layout != "one-rank":
                yield pytest.param(layout, some, marks=marks, id="/".join((layout, *some)))


@pytest.mark.parametrize(("layout", "names"), [*_split_cases()])
def test_ranks_train_as_transformers_and_keep_all_of_it(layout: str, names: tuple[str, ...], tmp_path: Path) -> None:
    ranks = LAYOUTS[layout]
    layers = 8 if ranks.virtual else None
    models = {name: save_tiny_vision(tmp_path / name, name, tied="moe" not in name, layers=layers) for name in names}
    seen = run_ranks(ranks.world_size, _observe_split, models, ranks, timeout=300)
    for name, model in models.items():
        _compare([of_rank[name] for of_rank in seen], ranks, model)


def _compare(seen: list[Seen], layout: Layout, model: Path) -> None:
    trainer = PlainVisionTrainer(model, lr=LR)
    trainer.pictures = pictures_by_tokens(WITH_TEXT_RANK)

    def plain(trainer: PlainVisionTrainer = trainer) -> list[float]:
        with torch.no_grad():
            return torch.cat([trainer.logprobs(tokens) for tokens, _ in cases()]).tolist()

    before, step, after = plain(), trainer.train([WITH_TEXT_RANK]), plain()
    saved = model.with_name(f"{model.name}-hf")
    assert not list(directory_problems(saved, "--hf-checkpoint"))
    exported = PlainVisionTrainer(saved, lr=LR)  # with its own processor
    exported.pictures = trainer.pictures
    for of_rank in seen:
        np.testing.assert_allclose(np.concatenate(of_rank["before"]), before, rtol=0, atol=2e-5)
        assert of_rank["export"] == []
        assert of_rank["step"]["loss"] == pytest.approx(step["loss"], rel=1e-4, abs=1e-5)
        assert of_rank["step"]["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)
        np.testing.assert_allclose(np.concatenate(of_rank["after"]), after, rtol=0, atol=1e-3)
        np.testing.assert_allclose(np.concatenate(of_rank["after"]), plain(exported), rtol=0, atol=2e-5)
        assert of_rank["resumed"] == of_rank["after"] == seen[0]["after"]
    first, *others = [of_rank["tower"] for of_rank in seen if of_rank["tower"]]
    assert 1 + len(others) == layout.world_size // layout.pipeline
    assert all(tower == first for tower in others)  # bit by bit


@pytest.mark.parametrize("split", [pytest.param(1, marks=pytest.mark.long), 2])
def test_memory_is_planned_with_the_vision_tower(model: Path, split: int) -> None:
    """Tensor-parallel ranks of the first pipeline stage have it each, and split the language model."""
    arguments = ModelArguments(
        hf_checkpoint=model, tensor_model_parallel_size=split, pipeline_model_parallel_size=split
    )
    request = StageRequest(
        directory=model,
        model=arguments,
        world_size=split**2,
        tokens=64,
        logprob_chunk=16,
        temperature=1.0,
        entropy=False,
    )
    stages = measure_here(request)
    whole = count_elements(model)
    files = {name: tensor.numel() for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert [stage.tower for stage in stages][1:] == [0] * (split - 1)
    assert stages[0].tower == sum(size for name, size in files.items() if "visual." in name)
    if split == 1:
        assert model_parameters(stages, arguments) == whole
    assert whole <= model_parameters(stages, arguments) < 1.05 * whole  # norms and a tied embedding are there twice
