"""The files of a Hugging Face model directory, judged by their headers: nothing is loaded.

A shard that was cut off, one of the index that was not downloaded, weights of another model than config.json
describes: each would otherwise fail minutes later, in every process that loads the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from miles_async.types import JsonObject

Shape = tuple[int, ...]

_LENGTH_BYTES = 8  # a safetensors file: length of the header (little-endian), the header (JSON), the data
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_INDEX = "model.safetensors.index.json"


def directory_problems(path: Path, flag: str) -> Iterator[str]:
    """Why ``path``, given with ``flag``, is not the directory of a whole model; one line per problem."""
    where = f"{flag} {path}"
    if not os.path.exists(path):
        yield f"{where}: there is no such directory (nothing is downloaded: `hf download` it first)"
    elif not path.is_dir():
        yield f"{where}: expected a Hugging Face model directory, found a file"
    elif not os.path.isfile(path / "config.json"):
        yield f"{where}: the directory has no config.json, so it is not a Hugging Face model directory"
    elif not (config := read_config(path)):
        yield f"{where}: config.json is not a JSON object"
    elif not any(path.glob("*.safetensors")):
        yield f"{where}: the directory has no weights (*.safetensors)"
    else:
        problems = [*_number_problems(config)] or _weight_problems(path, config)
        yield from (f"{where}: {problem}" for problem in problems)


def _number_problems(config: JsonObject) -> Iterator[str]:
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "rope_theta"):
        value = config.get(name, 1)
        number = isinstance(value, int | float) if name == "rope_theta" else isinstance(value, int)
        if not number or isinstance(value, bool) or value <= 0:
            yield f"config.json: {name}: expected a number above 0, found {value!r}"


def read_config(path: Path) -> JsonObject:
    """Content of config.json in ``path``, as :func:`language_fields` has it; empty if it cannot be read."""
    return language_fields(read_json(path / "config.json"))


def language_fields(config: JsonObject) -> JsonObject:
    """The config with the fields of the language model at the top, where text models have them.

    Vision-language models are published so, or with these fields in text_config. ``model_type`` is the whole model's.
    """
    language = config.get("text_config")
    if not isinstance(language, dict):
        return config
    whole = {name: value for name, value in config.items() if name != "text_config"}
    kept = {name: whole[name] for name in ("model_type", "tie_word_embeddings") if name in whole}
    return {**whole, **language, **kept}


def read_json(path: Path) -> JsonObject:
    """Object in a JSON file; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _weight_problems(path: Path, config: JsonObject) -> Iterator[str]:
    index = read_json(path / _INDEX).get("weight_map")
    index = index if isinstance(index, dict) else {}
    missing = sorted({str(name) for name in index.values() if not (path / str(name)).is_file()})
    if missing:
        yield f"{_INDEX} names {len(missing)} file(s) that are not there: {_first(missing)}; download them again"
    shapes: dict[str, Shape] = {}
    damaged = False
    for file in sorted(path.glob("*.safetensors")):
        try:
            shapes |= read_shapes(file)
        except (OSError, ValueError) as error:
            damaged = True
            yield f"{file.name}: {error}; download it again"
    method = (config.get("quantization_config") or {}).get("quant_method", "fp8")  # others pack tensors as they like
    if not missing and not damaged and method == "fp8":
        yield from _shape_problems(shapes, config)


def count_elements(path: Path) -> int:
    """Elements of all tensors in the safetensors files of a directory. Raises OSError, ValueError."""
    return sum(prod(shape) for file in path.glob("*.safetensors") for shape in read_shapes(file).values())


def read_shapes(file: Path) -> dict[str, Shape]:
    """Name → shape of the tensors in a safetensors file. Raises ValueError if the file is not whole."""
    return {name: shape for name, (_, shape) in read_header(file).items()}


def read_header(file: Path) -> dict[str, tuple[str, Shape]]:
    """Name → dtype ("BF16", "F8_E4M3") and shape of a safetensors file's tensors. Raises ValueError as above."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
            raise ValueError(f"expected a safetensors file, found {size} bytes without its header")
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"expected the header of a safetensors file: {error!r}") from None
    if (expected := _LENGTH_BYTES + length + end) != size:
        raise ValueError(f"expected {expected} bytes, found {size}: the file was cut off or overwritten")
    return tensors


def _shape_problems(shapes: Mapping[str, Shape], config: JsonObject) -> Iterator[str]:
    """Tensors whose shapes config.json gives, under the names that the supported families share."""
    shapes = {name.replace("model.language_model.", "model."): shape for name, shape in shapes.items()}
    layers = config.get("num_hidden_layers")
    found = {int(part) for name in shapes if (part := _layer(name)) is not None}
    extra = config.get("num_nextn_predict_layers") or 0  # stored as further layers, for multi-token prediction
    if isinstance(layers, int) and found and max(found) + 1 not in (layers, layers + extra):
        yield f"the weights have {max(found) + 1} layers, config.json says num_hidden_layers {layers}"
    expected = _expected_shapes(config)
    wrong = [
        f"{name} is {list(shape)}, and by config.json {list(expected[kind])}"
        for name, shape in shapes.items()
        if (kind := _kind(name)) in expected and shape != expected[kind]
    ]
    if wrong:
        yield f"{len(wrong)} tensor(s) differ from config.json: {_first(wrong)}"
    if "model.embed_tokens.weight" not in shapes and found:
        yield "the weights have no model.embed_tokens.weight"
    if config.get("model_type") == "qwen3_vl_moe":
        yield from _transposed_experts(shapes, config)


def _transposed_experts(shapes: Mapping[str, Shape], config: JsonObject) -> Iterator[str]:
    """Experts of Qwen3-VL are published as [experts, input, output]; transformers (5.19) writes them the other way."""
    hidden, width = config.get("hidden_size"), config.get("moe_intermediate_size", 0)
    inputs = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    other = [
        f"{name} is {list(shape)}"
        for name, shape in shapes.items()
        if ".mlp.experts." in name and shape[1:] != inputs.get(name.split(".")[-1], shape[1:])
    ]
    if other:
        yield (
            f"{len(other)} tensor(s) of experts are not [experts, input, output] as published, which SGLang reads: "
            f"{_first(other)}; if transformers 5 wrote them, write each with .transpose(1, 2)"
        )


def _expected_shapes(config: JsonObject) -> dict[str, Shape]:
    """Kind of tensor → shape, for the kinds that config.json describes."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    kv_heads = config.get("num_key_value_heads") or heads
    vocabulary, intermediate = config.get("vocab_size"), config.get("intermediate_size")
    kinds: dict[str, tuple[int | None, ...]] = {
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    # Latent attention has other projections, and Gemma 4 other heads in some layers.
    if heads and head and "kv_lora_rank" not in config and config.get("model_type") != "gemma4_text":
        kinds |= {
            "q_proj": (
                heads * head * (2 if "linear_num_value_heads" in config else 1),
                hidden,
            ),  # and the output's gate
            "k_proj": (kv_heads * head, hidden),
            "v_proj": (kv_heads * head, hidden),
            "o_proj": (hidden, heads * head),
        }
    shapes = {kind: tuple(length for length in shape if isinstance(length, int)) for kind, shape in kinds.items()}
    return {kind: shape for kind, shape in shapes.items() if len(shape) == len(kinds[kind])}


def _kind(name: str) -> str:
    """Last part of a weight's name; empty for other tensors, and for experts, linear attention and vision towers,
    whose sizes have other names.
    """
    others = ("expert", ".linear_attn.", "visual.")
    return "" if any(part in name for part in others) or not name.endswith(".weight") else name.split(".")[-2]


def _layer(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["model", "layers"] and parts[2].isdigit() else None


def _first(items: list[str]) -> str:
    return items[0] + (f" (and {len(items) - 1} more)" if len(items) > 1 else "")
