"""Every patch of upstream is still needed: each test fails when its patch can go.

Imports happen in fresh processes, since a patch once applied stays. On a machine with CUDA the host patches are no-ops.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.integration.megatron_scenario import SEQUENCES, Layout, export_differences, make_backend
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny_qwen3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)


@without_cuda
def test_megatron_core_still_asks_for_cuda_devices() -> None:
    """cpu_compat.device_views."""
    result = run_python("import megatron.core.pipeline_parallel.schedules as s; s.torch.zeros([], device='cuda')")
    assert result.returncode != 0
    assert 'device="cuda"' in source_of("megatron.core.pipeline_parallel.schedules")


@without_cuda
@pytest.mark.skipif(bool(importlib.util.find_spec("transformer_engine")), reason="Transformer Engine is installed")
def test_bridge_still_imports_transformer_engine_unconditionally() -> None:
    """cpu_compat.absent_modules."""
    result = run_python("import megatron.bridge")
    assert result.returncode != 0
    assert "transformer_engine" in result.stderr or "triton" in result.stderr


@without_cuda
def test_install_lets_bridge_import_and_hides_the_stand_ins() -> None:
    result = run_python(
        "from miles_async.backends.megatron import cpu_compat; assert cpu_compat.install() and cpu_compat.install()\n"
        "import sys, torch, megatron.bridge, megatron.core.extensions.transformer_engine as te\n"
        "assert 'transformer_engine' not in sys.modules and 'triton' not in sys.modules, 'a stand-in is visible'\n"
        "assert not te.HAVE_TE and not torch.cuda.is_available()\n"
        "assert te.torch is not torch and torch.zeros(1).cuda().device.type == 'cpu'"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "text"),
    [
        # cpu_compat.rng
        ("megatron.core.tensor_parallel.random", "torch.cuda.set_rng_state"),
        # cpu_compat.optimizer_types
        ("megatron.core.optimizer.optimizer", "torch.cuda.FloatTensor"),
        ("megatron.core.optimizer.distrib_optimizer", "torch.cuda.FloatTensor"),
        ("megatron.core.optimizer.clip_grads", "torch.cuda.FloatTensor"),
        # cpu_compat.host_tensors
        ("megatron.core.transformer.moe.moe_utils", "def maybe_move_tensor_to_cpu"),
        # checkpoint_writer
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", 'mp.get_context("spawn")'),
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", 'mp.get_context("fork")'),
    ],
)
def test_what_is_patched_is_still_there(module: str, text: str) -> None:
    assert text in source_of(module), f"{module} no longer has {text!r}: can its patch go?"


# ------------------------------------------------------------------------------------------- bridge fixes
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("compat") / "qwen3", tied=False, rope_theta=5e5)


def test_bridge_still_corrupts_row_parallel_weights_without_the_fix(model: Path) -> None:
    """bridge_fixes: strided splits over gloo, at TP 2."""
    differences = run_ranks(2, _tensor_parallel_without_fixes, model)[0]
    assert any("o_proj" in name or "down_proj" in name for name in differences), "the fix can go"


def test_provider_still_misses_what_we_set(model: Path) -> None:
    """model._provider: the rotary base of transformers 5, and the marks of tensor-parallel parameters."""
    [provider] = run_ranks(1, _provider_fields, model)
    assert provider["rotary_base"] != 5e5
    assert provider["perform_initialization"] is False


def _tensor_parallel_without_fixes(rank: int, world_size: int, store: dist.Store, model: Path) -> list[str]:
    from miles_async.backends.megatron import bridge_fixes

    bridge_fixes.apply = lambda: False
    return export_differences(make_backend(rank, world_size, store, model, Layout(2, tensor=2)), model)


def _provider_fields(rank: int, world_size: int, store: dist.Store, model: Path) -> dict[str, object]:
    from miles_async.backends.megatron.platform import Platform

    Platform.named("auto").prepare(0)
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(str(model)).to_megatron_provider(load_weights=True)
    return {name: getattr(provider, name) for name in ("rotary_base", "perform_initialization")}


# ------------------------------------------------------------------------------------------------- experts
@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = tmp_path_factory.mktemp("compat") / "qwen3moe"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def test_experts_are_loaded_and_exported_in_their_places(mixture: Path) -> None:
    [(logprobs, differences)] = run_ranks(1, _experts, mixture)
    plain = PlainTrainer(mixture, lr=0.0)
    with torch.no_grad():
        expected = [plain.logprobs(sequence).tolist() for sequence in SEQUENCES if len(sequence) > 1]
    np.testing.assert_allclose(np.concatenate([row for row in logprobs if row]), np.concatenate(expected), atol=1e-5)
    assert differences == []


def _experts(rank: int, world_size: int, store: dist.Store, model: Path) -> tuple[list[list[float]], list[str]]:
    backend = make_backend(rank, world_size, store, model, Layout())
    return backend.logprobs(SEQUENCES), export_differences(backend, model)


def source_of(module: str) -> str:
    """Without importing it."""
    root = importlib.util.find_spec("megatron.core")
    assert root is not None
    assert root.origin is not None
    path = Path(root.origin).parent.joinpath(*module.split(".")[2:]).with_suffix(".py")
    return path.read_text()
