"""LoRA and DoRA against explicit matrices in float64: values, gradients, optimizer steps, the merged export; a model
without its adapters as the reference of a KL loss; checkpoints, on the same layout and another; peft's files.

One set of processes per number of ranks observes all cases that were selected; the tests below only compare.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.backends.megatron.checkpoints.hf_export import ADAPTER_DIRECTORY
from miles_async.errors import CheckpointError, ConfigurationError
from miles_async.types import Picture
from tests.integration import vision_models
from tests.integration.family_table import DEEPER
from tests.integration.megatron_scenario import (
    CORRECTED,
    LR,
    PLAIN,
    SEQUENCES,
    Case,
    Layout,
    each_case,
    export_differences,
    leave_groups,
    make_backend,
    rollout_steps,
    shard_of,
)
from tests.integration.plain_adapters import PlainAdapters, first_matrix, merged_weights
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.selection import selected
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import to_shards
from tests.integration.vision_models import PlainVisionTrainer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

RANK, ALPHA = 4, 8.0
LAYOUTS = {
    "one-rank": Layout(),
    "one-rank-recompute": Layout(model={"recompute_granularity": "full"}),
    "tp2-sequence-parallel": Layout(2, tensor=2),
    "tp2": Layout(2, tensor=2, sequence_parallel=False),
    "pp2": Layout(2, pipeline=2),
    "pp2-virtual2": Layout(2, pipeline=2, virtual=2, micro_batches=2),
    "dp2": Layout(2),
    "cp2": Layout(2, context=2, micro_batches=2),
    "ep2": Layout(2, expert=2, micro_batches=2),
    "tp2-ep2": Layout(2, tensor=2, expert=2, expert_tensor=1),
}
CASES: list[Case] = [  # layout, family and adapters
    ("one-rank", "qwen3 lora"),
    ("one-rank", "qwen3-moe lora"),
    ("one-rank", "deepseek-v3 dora"),
    ("one-rank", "qwen2.5-vl lora"),
    ("tp2-sequence-parallel", "qwen2 dora"),
    ("pp2", "qwen2 dora"),
    ("ep2", "qwen3-moe dora"),
]
AT_NIGHT: list[Case] = [
    ("one-rank", "qwen3-vl dora"),
    ("one-rank-recompute", "qwen3-vl lora"),
    ("tp2-sequence-parallel", "qwen3-vl lora"),
    ("tp2", "qwen2.5-vl dora"),
    ("pp2", "qwen3-vl dora"),
    ("cp2", "qwen2.5-vl lora"),
    ("one-rank-recompute", "qwen2 dora"),
    ("tp2-sequence-parallel", "qwen3 lora"),
    ("tp2", "qwen2 dora"),
    ("tp2-sequence-parallel", "gemma2 dora"),  # a norm after attention and MLP
    ("pp2-virtual2", "qwen3-four-layers dora"),
    ("dp2", "qwen3 lora"),
    ("dp2", "qwen3-moe dora"),
    ("cp2", "qwen3 lora"),
    ("cp2", "qwen3-moe dora"),
    ("ep2", "qwen3-moe lora"),
    ("tp2-ep2", "deepseek-v3 dora"),
]
RESHARDED = ("tp2-sequence-parallel", "qwen2 dora")  # is loaded on one rank, too
STEPS = 4  # rollout steps, the last of which is made again after a load


@dataclass
class Observed:
    """On one rank."""

    differs_from_source: list[str]  # the export, before training
    logprobs: list[list[float]]
    steps: list[dict[str, float]]
    exported: dict[str, np.ndarray]  # after training
    logprobs_after: list[list[float]]
    trained: set[str]  # kinds of parameters in the optimizer
    resumed: dict[str, float]  # the last step, after a load
    refusal: str  # of the checkpoint, without adapters
    resumed_exports_alike: bool
    started_exports_alike: bool  # a backend that started from the adapter's files


# ------------------------------------------------------------------------------------------- in the ranks
def _observe_all(
    rank: int, world_size: int, store: dist.Store, cases: tuple[Case, ...], root: Path
) -> dict[Case, Observed | str]:
    def observe(store: dist.Store, case: Case) -> Observed:
        return _observe(store, rank, world_size, case, root)

    return each_case(cases, store, observe)


def _adapted(store: dist.Store, rank: int, world_size: int, case: Case, root: Path, layout: Layout) -> MegatronBackend:
    family, kind = case[1].split()
    settings = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_type": kind, **layout.model}
    layout = dataclasses.replace(layout, model=settings)
    return make_backend(rank, world_size, store, root / family, layout, _algorithm(case))


def _observe(store: dist.Store, rank: int, world_size: int, case: Case, root: Path) -> Observed:
    layout, checkpoint = LAYOUTS[case[0]], root / "checkpoints" / "-".join(case)
    first = _adapted(dist.PrefixStore("first", store), rank, world_size, case, root, layout)
    _set_first_matrices(first)
    sequences, pictures = _sequences(case[1])
    differs = export_differences(first, root / case[1].split()[0])
    logprobs = first.logprobs(sequences, pictures=pictures)
    shards = [shard_of(first, step, layout.micro_batches) for step in _rollouts(case[1])]
    steps = [first.train(shard) for shard in shards[:-1]]
    first.save(checkpoint)
    steps.append(first.train(shards[-1]))
    exported, logprobs_after = _exported(first), first.logprobs(sequences, pictures=pictures)
    saved = root / "saved" / "-".join(case)
    first.save_hf(saved)
    trained = {
        name.rpartition(".adapter.")[2]
        for module in first._model.modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    first.close()

    second = _adapted(dist.PrefixStore("second", store), rank, world_size, case, root, layout)
    second.load(checkpoint)
    resumed, alike = second.train(shards[-1]), _exported(second)
    second.close()
    started = dataclasses.replace(layout, model={**layout.model, "lora_adapter_path": saved / ADAPTER_DIRECTORY})
    third = _adapted(dist.PrefixStore("third", store), rank, world_size, case, root, started)
    from_files = _exported(third)
    third.close()
    refusal = ""
    if case == CASES[0]:
        whole = make_backend(rank, world_size, dist.PrefixStore("whole", store), root / "qwen3", layout)
        try:
            whole.load(checkpoint)
        except CheckpointError as error:
            refusal = str(error)
        whole.close()
    return Observed(
        differs_from_source=differs,
        logprobs=logprobs,
        steps=steps,
        exported=exported,
        logprobs_after=logprobs_after,
        trained=trained,
        resumed=resumed,
        refusal=refusal,
        resumed_exports_alike=all(np.array_equal(exported[name], alike[name]) for name in exported),
        started_exports_alike=all(np.array_equal(exported[name], from_files[name]) for name in exported),
    )


def _set_first_matrices(backend: MegatronBackend) -> None:
    """Overwrite each A by the reference's; B is 0, whatever the layout."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from megatron.core import parallel_state

    for module in backend._model.modules:
        for name, wrapper in module.named_modules():
            if not isinstance(wrapper, AdapterWrapper):
                continue
            place, part = re.search(r"(.*layers\.\d+)\.(?:self_attention|mlp)\.(.*)$", name).groups()  # type: ignore[union-attr]
            layer = module.get_submodule(place).layer_number - 1  # in the whole model
            if expert := re.match(r"experts\.local_experts\.(\d+)\.(.*)", part):
                count = len(module.get_submodule(name.rpartition(".local_experts.")[0]).local_experts)
                number = int(expert[1]) + count * parallel_state.get_expert_model_parallel_rank()
                part = f"experts.{number}.{expert[2]}"
            weight, group = wrapper.adapter.linear_in.weight, wrapper.adapter.linear_in.tp_group
            by_columns = wrapper.adapter.input_is_parallel
            width = weight.shape[1] * (group.size() if by_columns else 1)
            whole = first_matrix(f"{layer}.{part.replace('shared_experts', 'shared')}", RANK, width)
            weight.data.copy_(whole.chunk(group.size(), dim=int(by_columns))[group.rank()])


def _exported(backend: MegatronBackend) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in backend.export_weights()}


def _load_on_one_rank(rank: int, world_size: int, store: dist.Store, root: Path) -> dict[str, np.ndarray]:
    """The export of a checkpoint that two ranks saved, one step before their last."""
    backend = _adapted(store, rank, world_size, RESHARDED, root, Layout())
    backend.load(root / "checkpoints" / "-".join(RESHARDED))
    for step in _rollouts(RESHARDED[1])[-1:]:
        backend.train(to_shards(step, dp_size=1, micro_batches=1)[0])
    exported = _exported(backend)
    backend.close()
    return exported


def _refusals(rank: int, world_size: int, store: dist.Store, root: Path) -> list[str]:
    adapter = root / "saved" / "-".join(CASES[0]) / ADAPTER_DIRECTORY
    attempts: list[tuple[str, Layout]] = [
        ("qwen3", Layout(model={"target_modules": ("linear_kv_up_proj",)})),
        ("qwen3-moe", Layout(2, tensor=2)),
        ("qwen3", Layout(2, model={"target_modules": ("linear_qkv",), "lora_adapter_path": adapter})),
        ("qwen3", Layout(2, model={"lora_adapter_path": _with_separate_matrices(adapter, rank)})),
    ]
    found = []
    for number, (family, layout) in enumerate(attempts):
        settings = dataclasses.replace(layout, model={"lora_rank": RANK, **layout.model})
        try:
            make_backend(rank, world_size, dist.PrefixStore(f"{number}", store), root / family, settings)
        except ConfigurationError as error:
            found.append(str(error))
        leave_groups()
    return found


def _with_separate_matrices(adapter: Path, rank: int) -> Path:
    """A copy in which one of a layer's projections has another A than the others."""
    copy = adapter.parent / f"separate-{rank}"
    shutil.copytree(adapter, copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] += 1
    save_file(tensors, copy / "adapter_model.safetensors")
    return copy


def _bf16(rank: int, world_size: int, store: dist.Store, directory: Path) -> list[str]:
    layout = Layout(model={"lora_rank": RANK, "lora_type": "dora"})
    backend = make_backend(rank, world_size, store, directory, layout, bf16=True)
    differs = export_differences(backend, directory)
    backend.train(to_shards(_rollouts("qwen3")[0], dp_size=1, micro_batches=1)[0])
    moved = export_differences(backend, directory)
    backend.close()
    assert any("proj" in name for name in moved)
    return differs


def _recomputed(rank: int, world_size: int, store: dist.Store, directory: Path) -> list[dict[str, np.ndarray]]:
    """Exports after a step without and with a recomputed MLP, where nothing before the first MLP is trained."""
    exports = []
    for settings in ({}, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}):
        layout = Layout(model={"lora_rank": RANK, "target_modules": ("linear_fc1", "linear_fc2"), **settings})
        backend = make_backend(rank, world_size, dist.PrefixStore(str(len(exports)), store), directory, layout)
        backend.train(to_shards(_rollouts("qwen3")[0], dp_size=1, micro_batches=1)[0])
        exports.append(_exported(backend))
        backend.close()
    return exports


def _reads_images(model: str) -> bool:
    return model.split()[0] in vision_models.CONFIGS


def _rollouts(model: str) -> list[Any]:
    once = (
        [[vision_models.vision_samples(6, seed=seed)] for seed in range(3)]
        if _reads_images(model)
        else rollout_steps(1)
    )
    return [step for _ in range(2) for step in once][:STEPS]


def _sequences(model: str) -> tuple[list[list[int]], list[tuple[Picture, ...]]]:
    """Sequences, and the images of each."""
    cases = vision_models.cases() if _reads_images(model) else [(sequence, ()) for sequence in SEQUENCES]
    return [sequence for sequence, _ in cases], [pictures for _, pictures in cases]


def _algorithm(case: Case) -> AlgorithmArguments:
    return CORRECTED if case[1] == "qwen3 lora" else PLAIN


# -------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in {model.split()[0] for _, model in CASES + AT_NIGHT}:
        family, layers = DEEPER.get(name, (name, 2))
        if _reads_images(family):
            vision_models.save_tiny_vision(root / name, family, tied=True)
        else:
            save_tiny(family, root / name, num_hidden_layers=layers)
    return root


@pytest.fixture(scope="module")
def seen(root: Path, request: pytest.FixtureRequest) -> Callable[[Case], list[Observed]]:
    """Observations of each rank in a case; the first of a number of ranks observes all that were selected."""
    chosen: list[Case] = selected(request, "case")

    @cache
    def observed(cases: tuple[Case, ...]) -> list[dict[Case, Observed | str]]:
        return run_ranks(LAYOUTS[cases[0][0]].world_size, _observe_all, cases, root, timeout=300)

    def of_case(case: Case) -> list[Observed]:
        size = LAYOUTS[case[0]].world_size
        of_size = tuple(other for other in chosen if LAYOUTS[other[0]].world_size == size)
        ranks = [rank[case] for rank in observed(of_size if case in of_size else (case,))]
        for rank in ranks:
            assert isinstance(rank, Observed), rank
        return ranks  # type: ignore[return-value]

    return of_case


@pytest.fixture(
    scope="module", ids="/".join, params=[*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in AT_NIGHT)]
)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def ranks(seen: Callable[[Case], list[Observed]], case: Case) -> list[Observed]:
    return seen(case)


@dataclass
class Plain:
    logprobs: list[list[float]]
    steps: list[dict[str, float]]
    modules: set[str]  # of transformers' model, that have adapters
    merged: Mapping[str, np.ndarray]
    logprobs_after: list[list[float]]


@pytest.fixture(scope="module")
def plain(root: Path) -> Callable[[str], Plain]:
    @cache
    def of_model(model: str) -> Plain:
        family, kind = model.split()
        corrected = _algorithm(("", model)) == CORRECTED
        sequences, pictures = _sequences(model)
        trainer = (PlainVisionTrainer if any(pictures) else PlainTrainer)(
            root / family,
            lr=LR,
            tis=corrected,
            kl=0.3 if corrected else None,
            entropy=(0.1, 0.4) if corrected else (0.0, 0.0),
            adapters=PlainAdapters(RANK, ALPHA, dora=kind == "dora"),
        )

        rollouts = _rollouts(model)
        if isinstance(trainer, PlainVisionTrainer):
            trainer.pictures = vision_models.pictures_by_tokens([sample for [step] in rollouts for sample in step])

        def logprobs() -> list[list[float]]:
            with torch.no_grad():
                return [trainer.logprobs(sequence).tolist() if len(sequence) > 1 else [] for sequence in sequences]

        before, steps = logprobs(), [trainer.train(step) for step in rollouts]
        merged = {name: tensor.numpy() for name, tensor in merged_weights(trainer.model)}
        modules = {name.removesuffix(".weight") for name in merged}
        return Plain(
            before, steps, modules, {_in_files(name, model): each for name, each in merged.items()}, logprobs()
        )

    return of_model


def test_new_adapters_change_nothing(ranks: list[Observed], case: Case, plain: Callable[[str], Plain]) -> None:
    for rank in ranks:
        assert rank.differs_from_source == []
        _assert_close(rank.logprobs, plain(case[1]).logprobs, 1e-5)


def test_losses_and_gradient_norms_equal_the_reference(
    ranks: list[Observed], case: Case, plain: Callable[[str], Plain]
) -> None:
    """Gradients of B first, then of A too, and with DoRA of lengths; with a KL to the model without its adapters."""
    for rank in ranks:
        for ours, reference in zip(rank.steps, plain(case[1]).steps, strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=1e-6)
            assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_the_export_has_the_trained_adapters_merged_in(
    ranks: list[Observed], case: Case, plain: Callable[[str], Plain], root: Path
) -> None:
    expected = plain(case[1])
    source = _weights(root / case[1].split()[0])
    for rank in ranks:
        assert expected.merged.keys() <= rank.exported.keys()
        for name, weight in expected.merged.items():
            np.testing.assert_allclose(rank.exported[name], weight, rtol=0, atol=1e-4, err_msg=name)
        for name in rank.exported.keys() - expected.merged.keys():
            np.testing.assert_array_equal(rank.exported[name], source[name].numpy(), err_msg=name)
        _assert_close(rank.logprobs_after, expected.logprobs_after, 1e-3)


def test_only_adapters_are_trained(ranks: list[Observed], case: Case) -> None:
    lengths = {"row_lengths"} if case[1].endswith("dora") else set()
    for rank in ranks:
        assert rank.trained == {"linear_in.weight", "linear_out.weight"} | lengths


def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(ranks: list[Observed]) -> None:
    # covers: C9
    for rank in ranks:
        assert {**rank.resumed, "step_seconds": 0} == {**rank.steps[-1], "step_seconds": 0}
        assert rank.resumed_exports_alike


def test_another_layout_resumes_too(seen: Callable[[Case], list[Observed]], root: Path) -> None:
    # covers: C9
    expected = seen(RESHARDED)[0].exported
    [exported] = run_ranks(1, _load_on_one_rank, root)
    for name, weight in exported.items():
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=1e-5, err_msg=name)


def test_the_files_of_the_peft_library_hold_the_adapters(
    ranks: list[Observed], case: Case, plain: Callable[[str], Plain], root: Path
) -> None:
    """Its formula on the matrices of the files gives what is exported, and training starts from them."""
    saved, source = root / "saved" / "-".join(case), root / case[1].split()[0]
    tensors = load_file(saved / ADAPTER_DIRECTORY / "adapter_model.safetensors")
    config = json.loads((saved / ADAPTER_DIRECTORY / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (RANK, ALPHA, case[1].endswith("dora"))
    weights = _weights(source)
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    assert modules == plain(case[1]).modules
    for module in modules:
        name, of_module = f"base_model.model.{module}", _in_files(f"{module}.weight", case[1])
        total = weights[of_module].double() + (
            ALPHA / RANK * tensors.pop(f"{name}.lora_B.weight").double() @ tensors.pop(f"{name}.lora_A.weight").double()
        )
        if config["use_dora"]:
            total *= (tensors.pop(f"{name}.lora_magnitude_vector") / total.norm(dim=1))[:, None]
        np.testing.assert_allclose(ranks[0].exported[of_module], total.numpy(), rtol=0, atol=1e-6, err_msg=module)
    assert not tensors
    moved = {name for name, value in weights.items() if not np.array_equal(value.numpy(), ranks[0].exported[name])}
    assert moved == {_in_files(f"{module}.weight", case[1]) for module in modules}
    assert {module.rpartition(".")[2] for module in modules} == set(config["target_modules"])
    assert all(rank.started_exports_alike for rank in ranks)


def test_a_checkpoint_of_adapters_is_none_of_a_whole_model(seen: Callable[[Case], list[Observed]], root: Path) -> None:
    assert "it holds adapters" in seen(CASES[0])[0].refusal
    saved = sum(file.stat().st_size for file in (root / "checkpoints" / "-".join(CASES[0])).rglob("*.distcp"))
    assert 0 < saved < (root / "qwen3/model.safetensors").stat().st_size


def test_new_adapters_change_nothing_in_bfloat16(tmp_path: Path) -> None:
    directory = save_tiny("qwen3", tmp_path / "model", dtype="bfloat16")
    assert run_ranks(1, _bf16, directory) == [[]]


def test_a_recomputed_first_layer_is_trained(root: Path) -> None:
    [(plain, recomputed)] = run_ranks(1, _recomputed, root / "qwen3")
    source = load_file(root / "qwen3/model.safetensors")
    assert not np.array_equal(
        plain["model.layers.0.mlp.down_proj.weight"], source["model.layers.0.mlp.down_proj.weight"]
    )
    for name, weight in plain.items():
        np.testing.assert_allclose(recomputed[name], weight, rtol=0, atol=1e-6, err_msg=name)


def test_what_cannot_be_adapted_is_refused(seen: Callable[[Case], list[Observed]], root: Path) -> None:
    # covers: M21
    seen(CASES[0])  # saves an adapter
    for absent, shared, others, separate in run_ranks(2, _refusals, root):
        assert absent == "--target-modules: the model has no layer named linear_kv_up_proj"
        assert "--expert-tensor-parallel-size 2" in shared
        assert "found others, of" in others
        assert "change --target-modules" in others
        assert "have an A each" in separate


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in directory.glob("*.safetensors") for name, weight in load_file(file).items()}


def _in_files(name: str, model: str) -> str:
    """The name of a parameter of transformers' model in its files."""
    return name.replace(".language_model.", ".") if model.startswith("qwen2.5-vl") else name


def _assert_close(ours: list[list[float]], reference: list[list[float]], tolerance: float) -> None:
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(reference), rtol=0, atol=tolerance)
