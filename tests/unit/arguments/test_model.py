"""How layers are shared out over pipeline stages."""

from __future__ import annotations

import pytest

from miles_async.arguments.model import ModelArguments
from miles_async.errors import ConfigurationError


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
    model = ModelArguments(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    assert model.stage_layers(layers) == expected


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
    model = ModelArguments(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    with pytest.raises(ConfigurationError, match=message):
        model.stage_layers(layers)
