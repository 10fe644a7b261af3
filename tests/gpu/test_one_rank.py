"""One Megatron rank on the device: against transformers on the CPU, fused against host layers, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.gpu.figures import Figures, peak_bytes
from tests.integration.tiny_models import save_tiny

if TYPE_CHECKING:
    from miles_async.backends.megatron.backend import MegatronBackend

needs_megatron = pytest.mark.needs("megatron.core", "megatron.bridge", "msgspec", "structlog")
needs_fused = pytest.mark.needs("megatron.core", "megatron.bridge", "msgspec", "structlog", "transformer_engine")
LARGER = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 64}
TOKENS = 4096


@contextmanager
def one_rank(directory: Path, **settings: object) -> Iterator[MegatronBackend]:
    """A backend that is alone in its world."""
    import torch.distributed as dist

    from miles_async.backends.megatron.platform import Platform

    torch.backends.cuda.matmul.allow_tf32 = False
    Platform.cuda().prepare(0)  # before anything imports megatron
    from tests.integration.megatron_scenario import Layout, make_backend

    model = settings.pop("model", {})
    backend = make_backend(0, 1, dist.HashStore(), directory, Layout(model=model), device="cuda", **settings)
    try:
        yield backend
    finally:
        backend.close()


@needs_megatron
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_step_equals_plain_pytorch(family: str, bf16: bool, recompute: str, tmp_path: Path, figures: Figures) -> None:
    from tests.integration.megatron_scenario import SEQUENCES
    from tests.integration.plain_reference import PlainTrainer
    from tests.integration.toy_batches import to_shards, toy_samples

    directory = save_tiny(family, tmp_path / family, dtype="bfloat16" if bf16 else "float32")
    plain = PlainTrainer(directory, lr=1e-3)
    with torch.no_grad():
        expected = np.concatenate([plain.logprobs(sequence) for sequence in SEQUENCES if len(sequence) > 1])
    step = plain.train([toy_samples(8)])
    with one_rank(directory, bf16=bf16, recompute=recompute) as backend:
        difference = np.abs(np.concatenate(backend.logprobs(SEQUENCES)) - expected)
        ours = backend.train(to_shards([toy_samples(8)], dp_size=1, micro_batches=1)[0])
    figures.add(
        "against plain PyTorch",
        model=family,
        dtype="bf16" if bf16 else "fp32",
        recompute=recompute or "none",
        logprobs_mean=float(difference.mean()),
        logprobs_max=float(difference.max()),
        grad_norm=abs(ours["grad_norm"] / step["grad_norm"] - 1),
    )
    exact = 1e-3 if find_spec("transformer_engine") else 1e-5  # Transformer Engine multiplies fp32 in TF32
    assert difference.mean() < (0.02 if bf16 else exact)  # a rounded router may choose another expert for a token
    assert ours["grad_norm"] == pytest.approx(step["grad_norm"], rel=0.05 if bf16 else 1e-3)


@needs_fused
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_fused_layers_equal_host_layers(
    family: str, tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_async.backends.megatron.platform import Platform
    from tests.integration.megatron_scenario import SEQUENCES

    directory, platform = save_tiny(family, tmp_path / family, dtype="bfloat16"), Platform.cuda()
    with one_rank(directory, bf16=True) as backend:
        fused = np.concatenate(backend.logprobs(SEQUENCES))
    monkeypatch.setattr(Platform, "cuda", lambda: platform.with_host_layers)
    with one_rank(directory, bf16=True) as backend:
        host = np.concatenate(backend.logprobs(SEQUENCES))
    figures.add("fused against host layers", model=family, logprobs_mean=float(np.abs(fused - host).mean()))
    assert np.abs(fused - host).mean() < 0.02


@needs_megatron
def test_a_step_takes_the_memory_that_dry_run_tells(tmp_path: Path, figures: Figures) -> None:
    from miles_async.arguments.model import ModelArguments
    from miles_async.backends.megatron.memory.plan import measure, rank_bytes
    from miles_async.backends.megatron.memory.stages import StageRequest
    from tests.integration.toy_batches import long_sample_shard

    # In fp32 attention of Transformer Engine takes memory by the square of the sequence, which the plan doesn't count.
    directory = save_tiny("qwen3", tmp_path / "model", dtype="bfloat16", **LARGER, max_position_embeddings=TOKENS)
    model = ModelArguments(bf16=True)
    request = StageRequest(
        directory=directory, model=model, world_size=1, tokens=TOKENS, logprob_chunk=1024, temperature=1.0,
        entropy=False,
    )  # fmt: skip
    stage = measure(request)[model.recompute_granularity][0]
    told = rank_bytes(stage, model, 1, reference=False, critic=False, bucket=0, copies_saves=False).total

    def step() -> None:
        with one_rank(directory, bf16=True, logprob_chunk=1024) as backend:
            backend.train(long_sample_shard(TOKENS))

    taken = peak_bytes(step, "cuda")
    figures.add("memory of a rank", told_mib=told / 2**20, taken_mib=taken / 2**20)
    assert taken == pytest.approx(told, rel=0.1)
