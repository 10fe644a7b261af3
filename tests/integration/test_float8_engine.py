"""``--rollout-quantization fp8``: a real trainer quantizes what it publishes, and a real SGLang server serves it.

Every element and every scale that was sent is held, and log-probs are those of transformers with the same rounded
weights.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.arguments import Arguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.server_groups import ServerGroup
from miles_async.weights import fp8
from miles_async.wiring.engines import server_spec
from tests.integration.publishing import CANARY, TRANSPORTS, Trainer, one_engine, published_spec, publishing
from tests.integration.served_models import MAX_LENGTH, reference_logprobs, save_words
from tests.integration.tiny_models import save_tiny, split_files
from tests.integration.vision_models import save_tiny_vision

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

# Whole blocks on each of two ranks.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
WIDE = HEADS | {"hidden_size": 256, "intermediate_size": 256}
MIXTURE = WIDE | {"moe_intermediate_size": 256}
LATENT = {
    "hidden_size": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
AGREES = 1e-4  # log-probs of the same weights
DIFFERS = 3e-3  # and of those before rounding
TOLERANCE = 0.3  # of the canary: the trainer does not round

CASES = [
    ("qwen3", WIDE, 1, "distributed"),
    ("qwen3-moe", MIXTURE, 2, "disk, xor"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("qwen2", WIDE, 2, "object_store"),
            ("qwen3-tied", WIDE, 1, "distributed, two senders"),
            ("minimax-m2", WIDE, 1, "distributed"),
            ("glm4-moe", MIXTURE, 1, "disk"),
            ("glm4-moe-lite", LATENT, 1, "distributed"),
            ("deepseek-v3", LATENT, 1, "distributed"),
        )
    ),
]


@pytest.mark.parametrize(("family", "sizes", "ranks", "transport"), CASES)
async def test_engines_generate_with_the_rounded_weights(
    family: str,
    sizes: dict[str, int],
    ranks: int,
    transport: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_imports: Path,
) -> None:
    # covers: C8, M16
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for that on one NUMA node
    model = tmp_path / "model"
    save_tiny(family, model, seed=0, max_position_embeddings=MAX_LENGTH, **sizes)
    save_words(model)
    spec = published_spec(
        model, tmp_path, engine_imports, tensor_parallel_size=ranks, model_overrides={"quantization_config": fp8.CONFIG}
    )
    options = {"tolerance": TOLERANCE, "rollout_quantization": "fp8"} | TRANSPORTS[transport]
    async with one_engine(spec) as engine:
        with closing(Trainer(model)) as trainer:
            async with publishing(trainer, engine.fleet, tmp_path / "staged", **options) as published:
                for version in ("first", "second"):  # the second may come as a delta
                    publication = await published.next()
                    sent = dict(fp8.quantized(trainer.weights().items()))
                    assert publication.compared_tensors == len(sent) > len(trainer.weights())
                    assert publication.incomparable_tensors == 0
                    assert 0 < publication.canary_difference < TOLERANCE
                    plain = write(tmp_path / f"{version}-plain", trainer.weights(), like=model)
                    rounded = write(tmp_path / version, dequantized(sent), like=model)
                    found = (await engine.server.score(engine.url, CANARY, 30.0)).logprobs
                    np.testing.assert_allclose(found, reference_logprobs(rounded, CANARY), rtol=0, atol=AGREES)
                    assert np.abs(np.array(found) - reference_logprobs(plain, CANARY)).max() > DIFFERS


def quantized_model(directory: Path, family: str, sizes: dict[str, int]) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint in float8, and its tensors as floats. The model before that is in ``plain`` of ``directory``."""
    plain = directory / "plain"
    save_tiny(family, plain, seed=0, max_position_embeddings=MAX_LENGTH, **sizes)
    save_words(plain)
    tensors = dict(fp8.quantized(load_file(plain / "model.safetensors").items()))
    source = write(directory / "float8", tensors, like=plain)
    save_words(source)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": fp8.CONFIG}
    (source / "config.json").write_text(json.dumps(config))
    return source, dequantized(tensors)


@pytest.mark.long
@pytest.mark.parametrize(("family", "sizes"), [("qwen3-moe", MIXTURE), ("deepseek-v3", LATENT)])
async def test_engines_of_a_quantized_checkpoint_generate_with_floats_unless_told_otherwise(
    family: str, sizes: dict[str, int], tmp_path: Path, engine_imports: Path
) -> None:
    source, expected = quantized_model(tmp_path, family, sizes)
    arguments = Arguments(model=ModelArguments(hf_checkpoint=source))
    overrides = server_spec(arguments, ServerGroup(name="group"), tmp_path, "cpu").model_overrides
    spec = published_spec(source, tmp_path, engine_imports, model_overrides=overrides)
    async with one_engine(spec) as engine:
        with closing(Trainer(source)) as trainer:
            async with publishing(trainer, engine.fleet, tmp_path / "staged") as published:
                publication = await published.next()
                assert publication.compared_tensors == len(expected)
                assert publication.incomparable_tensors == 0


@pytest.mark.parametrize(("family", "sharded"), [("qwen3-moe", False), ("deepseek-v3", True)])
async def test_a_quantized_checkpoint_is_read_and_written_as_floats(family: str, sharded: bool, tmp_path: Path) -> None:
    source, expected = quantized_model(tmp_path, family, LATENT if sharded else MIXTURE)
    tensors = load_file(source / "model.safetensors")
    assert len(tensors) > len(expected)
    left = {}  # a layer for multi-token prediction, as it is
    if sharded:
        config = json.loads((source / "config.json").read_text())
        ahead = f"model.layers.{config['num_hidden_layers']}.mlp.up_proj.weight"
        (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        added = dict(fp8.quantized([(ahead, torch.rand(200, 128))]))
        left = dequantized(added)
        save_file(tensors | added, source / "model.safetensors", {"format": "pt"})
        split_files(source, 2)  # scales are in another file
    with closing(Trainer(source)) as trainer:
        read = trainer.weights()
        trainer.save_hf(tmp_path / "exported")
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
    found = {
        name: tensor
        for file in (tmp_path / "exported").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert found.keys() == (expected | left).keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], tensor) for name, tensor in left.items())
    if sharded:
        index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    plain = write(tmp_path / "floats", expected, like=tmp_path / "plain")
    np.testing.assert_array_equal(reference_logprobs(tmp_path / "exported", CANARY), reference_logprobs(plain, CANARY))


@pytest.mark.long
def test_a_quantized_model_that_reads_images_may_say_so_of_its_text(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "plain", "qwen3-vl", tied=False)
    tensors = dict(fp8.quantized(load_file(tmp_path / "plain" / "model.safetensors").items()))
    source = write(tmp_path / "float8", tensors, like=tmp_path / "plain")
    for file in (tmp_path / "plain").glob("*processor*.json"):
        shutil.copy(file, source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["quantization_config"] = fp8.CONFIG
    (source / "config.json").write_text(json.dumps(config))
    with closing(Trainer(source)) as trainer:
        read = trainer.weights()
    expected = dequantized(tensors)
    assert len(read) == len(expected) < len(tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


def dequantized(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as engines hold them, as floats."""
    scales = {name.removesuffix("_scale_inv"): sent[name] for name in sent if name.endswith("_scale_inv")}
    return {
        name: tensor.float() * torch.kron(scales[name], torch.ones(128, 128))[: len(tensor), : tensor.shape[1]]
        if name in scales
        else tensor
        for name, tensor in sent.items()
        if not name.endswith("_scale_inv")
    }


def write(directory: Path, weights: dict[str, torch.Tensor], *, like: Path) -> Path:
    """A model with the configuration of ``like``."""
    directory.mkdir()
    shutil.copy(like / "config.json", directory)
    save_file({n: t.contiguous() for n, t in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory
