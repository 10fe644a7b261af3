"""Files of float8 checkpoints: scales that do not fit are refused; matrices and stacks of them are multiplied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_async.backends.megatron.families.float8_files import check_files
from miles_async.errors import ConfigurationError
from miles_async.runtime.float8 import dequantized

NAME = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{NAME}_scale_inv"
WEIGHT = torch.zeros(130, 20).to(torch.float8_e4m3fn)
SCALE = torch.ones(2, 1)
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({NAME: WEIGHT, SCALES: SCALE}, CONFIG),
        ({NAME: WEIGHT, SCALES: SCALE}, {"text_config": CONFIG}),
        ({NAME: WEIGHT, SCALES: SCALE.bfloat16()}, CONFIG),
        ({NAME: WEIGHT, SCALES: SCALE.to(torch.float8_e8m0fnu)}, CONFIG),
        ({NAME: WEIGHT, SCALES: torch.ones(3, 1)}, {"quantization_config": {"weight_block_size": [64, 32]}}),
        ({NAME: WEIGHT.expand(3, 130, 20).clone(), SCALES: torch.ones(3, 2, 1)}, CONFIG),
        ({NAME: WEIGHT.float()}, CONFIG),
        ({NAME: WEIGHT.float()}, {}),
    ],
)
def test_whole_float8_files_are_accepted(
    tensors: dict[str, torch.Tensor], config: dict[str, object], tmp_path: Path
) -> None:
    for number, (name, tensor) in enumerate(tensors.items()):  # each in a file of its own
        save_file({name: tensor}, tmp_path / f"{number}.safetensors")
    check_files(config, tmp_path)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({NAME: WEIGHT}, CONFIG, f"{NAME} is F8_E4M3, and expected its scales in {SCALES}"),
        ({NAME: WEIGHT, f"{NAME}_scale": SCALE}, CONFIG, f"{NAME} is F8_E4M3, and expected its scales in {SCALES}"),
        ({NAME: WEIGHT, SCALES: SCALE}, {}, f"{NAME} is F8_E4M3, and config.json has no quantization_config"),
        ({SCALES: SCALE}, CONFIG, f"{SCALES} has the scales of a tensor that no file has"),
        ({NAME: WEIGHT.bfloat16(), SCALES: SCALE}, CONFIG, f"{NAME} has scales and is BF16, expected F8_E4M3"),
        (
            {NAME: WEIGHT, SCALES: torch.ones(3, 1)},  # of blocks of 64
            CONFIG,
            f"{SCALES} is F32 [3, 1], expected floats [2, 1] by weight_block_size [128, 128]",
        ),
        ({NAME: WEIGHT, SCALES: SCALE.to(torch.uint8)}, CONFIG, f"{SCALES} is U8 [2, 1], expected floats [2, 1]"),
        ({NAME: WEIGHT, SCALES: torch.tensor(1.0)}, CONFIG, f"{SCALES} is F32 [], expected floats [2, 1]"),
        ({NAME: WEIGHT[:, 0].clone(), SCALES: torch.ones(2)}, CONFIG, f"{SCALES} is F32 [2], expected"),
        ({NAME: WEIGHT, NAME[1:]: WEIGHT.clone()}, CONFIG, "(and 1 more): its values would be read wrongly"),
    ],
)
def test_float8_tensors_whose_scales_do_not_fit_are_refused(
    tensors: dict[str, torch.Tensor], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError) as raised:
        check_files(config, tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("stacked", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_each_block_is_multiplied_with_its_scale(stacked: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.rand(*stacked, 5, 7) * 4).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.arange(9).float()).reshape(3, 3).expand(*stacked, 3, 3)[..., :3]
    found = dequantized(values, scales.to(dtype), [2, 3])
    for row in range(5):
        for column in range(7):
            expected = values.float()[..., row, column] * scales[..., row // 2, column // 3]
            torch.testing.assert_close(found[..., row, column], expected, rtol=0, atol=0)
