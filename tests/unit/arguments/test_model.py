"""How layers are shared out over pipeline stages."""

from __future__ import annotations

import pytest

from miles_async.arguments.model import ModelArguments
from miles_async.errors import ConfigurationError


def model(stages: int, first: int | None, last: int | None) -> ModelArguments:
    """``first``, ``last``: layers of these stages."""
    return ModelArguments(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )


@pytest.mark.parametrize(
    ("stages", "first", "last", "layers", "expected"),
    [
        (1, None, None, 61, [61]),
        (4, None, None, 8, [2, 2, 2, 2]),
        (2, 2, None, 3, [2, 1]),
        (2, None, 2, 3, [1, 2]),
        (4, 5, 4, 61, [5, 26, 26, 4]),
        (2, 30, 31, 61, [30, 31]),
    ],
)
def test_layers_of_the_stages(
    stages: int, first: int | None, last: int | None, layers: int, expected: list[int]
) -> None:
    assert model(stages, first, last).stage_layers(layers) == expected


@pytest.mark.parametrize(
    ("stages", "first", "last", "layers", "message"),
    [
        (4, None, None, 61, "61 layers are left for 4 stages"),
        (4, 5, None, 61, "56 layers are left for 3 stages"),
        (2, 30, 30, 61, "1 layers are left for 0 stages"),
        (4, 60, None, 61, "1 layers are left for 3 stages"),
        (2, 62, None, 61, "-1 layers are left for 1 stages"),
        (1, 5, None, 61, "--decoder-first-pipeline-num-layers 5 without --pipeline-model-parallel-size"),
    ],
)
def test_what_does_not_add_up_is_refused(
    stages: int, first: int | None, last: int | None, layers: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model(stages, first, last).stage_layers(layers)


@pytest.mark.parametrize(
    ("stages", "size", "count", "layers", "expected"),
    [(1, None, None, 7, 1), (2, 2, None, 8, 2), (4, 1, None, 32, 8), (2, None, 4, 8, 4), (2, 4, None, 8, 1)],
)
def test_virtual_stages_of_a_rank(stages: int, size: int | None, count: int | None, layers: int, expected: int) -> None:
    model = ModelArguments(
        pipeline_model_parallel_size=stages,
        num_layers_per_virtual_pipeline_stage=size,
        num_virtual_stages_per_pipeline_rank=count,
    )
    assert model.virtual_stages(layers) == expected


def test_virtual_stages_of_unequal_ranks() -> None:
    model = ModelArguments(
        pipeline_model_parallel_size=3, decoder_last_pipeline_num_layers=2, num_virtual_stages_per_pipeline_rank=2
    )
    assert model.virtual_stages(10) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 3}, "stage 3 does not divide the layers of a pipeline rank"),
        ({"num_virtual_stages_per_pipeline_rank": 3}, "rank 3 does not divide the layers of a pipeline rank"),
        ({"num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2}, "give one of them"),
        (
            {"num_layers_per_virtual_pipeline_stage": 2, "pipeline_model_parallel_size": 1},
            "without --pipeline-model-parallel-size",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 2, "decoder_last_pipeline_num_layers": 2},
            "give --num-virtual-stages-per-pipeline-rank",
        ),
    ],
)
def test_virtual_stages_that_cannot_be_are_refused(flags: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelArguments(**({"pipeline_model_parallel_size": 2} | flags)).virtual_stages(8)
