"""A checkpoint of an earlier megatron-core is loaded, and training goes on as it did there.

``assets/core_0.16.tar.xz`` was written on Python 3.11 with megatron-core 0.16.1 and torch 2.13: the model below on one
rank, saved after one step; ``steps.json`` in it has the norms of the gradients of the next two, which depend on weights
and on Adam's moments.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.integration.megatron_scenario import Layout, make_backend
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import to_shards, toy_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ARCHIVE = Path(__file__).parent / "assets" / "core_0.16.tar.xz"
MODEL: dict[str, object] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
}


def _go_on(rank: int, world_size: int, store: dist.Store, model: Path, checkpoint: Path) -> list[float]:
    backend = make_backend(rank, world_size, store, model, Layout())
    backend.load(checkpoint)
    [shard] = to_shards([toy_samples(8)], dp_size=1, micro_batches=1)
    norms = [backend.train(shard)["grad_norm"] for _ in range(2)]
    backend.close()
    return norms


def test_training_goes_on_from_a_checkpoint_of_an_earlier_megatron(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    model = save_tiny("qwen3-moe", tmp_path / "model", seed=1, **MODEL)  # other weights than those that were saved
    [found] = run_ranks(1, _go_on, model, tmp_path / "checkpoint")
    assert found == pytest.approx(json.loads((tmp_path / "steps.json").read_text()), rel=1e-5)
