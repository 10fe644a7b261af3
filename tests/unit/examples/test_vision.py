"""The recipe for geometry problems: its data from the data set's rows, its flags on its model's config.json.

# covers: P8
"""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.math.prepare import INSTRUCTION
from examples.vision import geo3k_data
from miles_async.arguments import DataArguments
from miles_async.arguments.parser import parse_arguments
from miles_async.backends.megatron.families.hf_config import read_config
from miles_async.backends.megatron.families.layout import check_layout
from miles_async.prompts.rows import open_prompts
from miles_async.types import JsonObject
from miles_async.types.pictures import data_url
from tests.fakes.pictures import picture
from tests.unit.arguments.test_model_presets import config_of

VISION = Path("examples/vision")
MODEL = "Qwen3-VL-8B-Instruct"
RECIPES = {"geo3k": (config_of(MODEL), 8)}  # config, GPUs that train


def prepared(folder: Path, row: JsonObject) -> Path:
    source, output = folder / "source.parquet", folder / "geo3k.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), source)
    assert geo3k_data.main(["geo3k", str(output), "--source", str(source)]) == 0
    return output


@pytest.mark.parametrize("problem", ["<image>Find x.", "Find x."])
@pytest.mark.parametrize("as_url", [False, True])
def test_rows_are_prompts_with_figures(problem: str, as_url: bool, tmp_path: Path) -> None:
    figure = picture(5, 3)
    image = data_url(figure) if as_url else {"bytes": figure.content, "path": None}
    output = prepared(tmp_path, {"problem": problem, "answer": "3", "images": [image]})
    flags = parse_arguments([f"@{VISION}/geo3k.args"], prog="test").arguments.data
    rows = open_prompts(DataArguments(prompt_data=(str(output),), multimodal_keys=flags.multimodal_keys))
    row = rows.read(0)
    content = [{"type": "image"}, {"type": "text", "text": f"Find x.\n\n{INSTRUCTION}"}]
    assert row.messages == ({"role": "user", "content": content},)
    assert [image.read() for image in row.images] == [figure]
    assert row.label == "3"


def test_a_wrong_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text('{"problem": "Find x."}\n')
    assert geo3k_data.main(["geo3k", str(tmp_path / "out.jsonl"), "--source", str(source)]) == 2
    assert "row 1: it is not what its columns say" in capsys.readouterr().err


def test_the_recipe_splits_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config_of(MODEL).read_bytes())
    arguments = parse_arguments([f"@{VISION}/geo3k.args", "--hf-checkpoint", str(tmp_path)], prog="test").arguments
    assert arguments.cluster.trainer_world_size == RECIPES["geo3k"][1]
    check_layout(read_config(tmp_path), arguments.model, arguments.cluster.trainer_world_size)
