"""Bytes of a trainer rank from what was measured of its stage, by hand-made numbers."""

from __future__ import annotations

import dataclasses

import pytest

from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.memory.plan import RankBytes, model_parameters, rank_bytes
from miles_async.backends.megatron.memory.stages import StageMemory

STAGE = StageMemory(stages=range(1, 3), parameters=1000, expert_parameters=8000, kept=70, peak=100, under_way=3)
MODEL = ModelArguments(
    bf16=True,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=4,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
)


def bytes_of(
    stage: StageMemory = STAGE, model: ModelArguments = MODEL, world_size: int = 64, **options: object
) -> RankBytes:
    """A rank without another model, that sends nothing and copies no saves, but for ``options``."""
    plain = {"reference": False, "critic": False, "bucket": 0, "copies_saves": False}
    return rank_bytes(stage, model, world_size, **(plain | options))


def test_parts_of_a_rank() -> None:
    """64 ranks: dense parameters are on 8 replicas, those of experts on 4."""
    found = bytes_of(reference=True, bucket=5)
    assert found.weights == found.reference == 2 * 9000
    assert found.gradients == 4 * 9000
    assert found.optimizer == 12 * (1000 // 8 + 8000 // 4)
    assert found.activations == 100 + 2 * 70  # three micro-batches are under way
    assert found.staging == 2 * 5
    assert found.total == 18000 * 2 + 36000 + 12 * 2125 + 240 + 10


def test_keys_and_values_of_other_context_parallel_ranks_are_there_once() -> None:
    """One layer's, whatever is under way."""
    stage = dataclasses.replace(STAGE, received=11)
    found = bytes_of(stage)
    assert found.activations == stage.activations == 100 + 11 + 2 * 70


def test_a_frozen_vision_tower_has_weights_alone() -> None:
    stage = dataclasses.replace(STAGE, tower=400)
    model = dataclasses.replace(MODEL, freeze_vision_tower=True)
    found = bytes_of(stage, model, copies_saves=True, kept_versions=1)
    assert found.weights == 2 * 9000
    assert found.gradients == 4 * 8600
    assert found.optimizer == 12 * (600 // 8 + 8000 // 4)
    assert found.kept_weights == 2 * 2 * 8600
    assert found.saved_copy == 2 * 9000 + 12 * 8600


def test_fp32_keeps_no_second_copy_of_the_weights() -> None:
    found = bytes_of(STAGE, ModelArguments(), 1)
    assert (found.weights, found.optimizer, found.reference) == (4 * 9000, 8 * 9000, 0)


@pytest.mark.parametrize(
    ("settings", "bf16", "bytes_per_parameter"),
    [
        ("", True, 12),
        ("--optimizer-cpu-offload", True, 4),
        ("--optimizer-cpu-offload", False, 0),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", True, 0),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", True, 4 + 4),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", True, 4 + 2 + 1),
    ],
)
def test_state_that_leaves_the_gpu_or_is_smaller(settings: str, bf16: bool, bytes_per_parameter: float) -> None:
    model = ModelArguments(bf16=bf16, megatron_extra=tuple(settings.split()))
    assert bytes_of(STAGE, model, 1).optimizer == bytes_per_parameter * 9000


def test_no_other_model_has_layers_for_multi_token_prediction() -> None:
    stage = dataclasses.replace(STAGE, ahead=100, expert_ahead=2000)
    found = bytes_of(stage, ModelArguments(), 1, reference=True, critic=True)
    assert (found.weights, found.gradients, found.optimizer) == (4 * 9000, 4 * 9000, 8 * 9000)
    assert found.reference == 4 * 6900
    assert found.critic == (4 + 4 + 8) * 6900


def test_gradients_and_optimizer_are_those_of_adapters() -> None:
    stage = dataclasses.replace(STAGE, adapters=80, expert_adapters=40)
    found = bytes_of(stage, dataclasses.replace(MODEL, lora_rank=2), reference=True, copies_saves=True, kept_versions=3)
    assert found.weights == 2 * (9000 + 120)
    assert found.reference == 2 * 9000
    assert found.gradients == 4 * 120
    assert found.optimizer == 12 * (80 // 8 + 40 // 4)
    assert found.saved_copy == 14 * 120
    assert found.kept_weights == 4 * 2 * 120


def test_a_critic_is_a_trained_model_with_a_value_head_for_an_output_layer() -> None:
    stage = dataclasses.replace(STAGE, output_layer=300, value_head=20)
    found, without = (bytes_of(stage, critic=critic, copies_saves=True) for critic in (True, False))
    assert found.critic == (2 + 4) * (720 + 8000) + 12 * (720 // 8 + 8000 // 4)
    assert found.total == without.total + found.critic
    assert found.saved_copy == without.saved_copy + 14 * (720 + 8000)


def test_shards_that_do_not_divide_are_rounded_up() -> None:
    stage = StageMemory(stages=range(1), parameters=10, expert_parameters=0, kept=0, peak=0, under_way=1)
    assert bytes_of(stage, ModelArguments(), 3).optimizer == 8 * 4


@pytest.mark.parametrize(("stages", "total"), [(range(1, 3), 2 * (1000 * 2 + 8000 * 4)), (range(1), 34000)])
def test_parameters_of_the_whole_model(stages: range, total: int) -> None:
    stage = StageMemory(stages=stages, parameters=1000, expert_parameters=8000, kept=0, peak=0, under_way=1)
    assert model_parameters([stage], MODEL) == total
