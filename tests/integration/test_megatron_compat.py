"""Every patch of upstream is still needed: each test fails when its patch can go.

Imports happen in fresh processes, since a patch once applied stays. On a machine with CUDA the host patches are no-ops.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from miles_async.backends.megatron.backend import MegatronBackend
from miles_async.backends.megatron.host.absent_modules import TRITON_USERS
from miles_async.errors import CheckpointError
from miles_async.runtime.processes.fork_server_process import ForkServer
from tests.integration.forked_script import run_forked
from tests.integration.megatron_scenario import Case, Layout, each_case, export_differences, make_backend
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import to_shards, toy_samples

pytestmark = pytest.mark.integration

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")


HIDE_TRITON = (  # as with a CPU build of torch; a CUDA build brings triton
    "import importlib.machinery, sys\n"
    "Finder = importlib.machinery.PathFinder\n"
    "def find_spec(name, *rest, find=Finder.find_spec): return None if name == 'triton' else find(name, *rest)\n"
    "Finder.find_spec = find_spec\n"
    "for name in [name for name in sys.modules if name.partition('.')[0] == 'triton']: del sys.modules[name]\n"
)
FRESH = {
    "core": "import megatron.core.pipeline_parallel.schedules as s; s.torch.zeros([], device='cuda')",
    "bridge": "import megatron.bridge",
    "stand-ins": (  # what the CUDA platform imports, without Transformer Engine
        "from miles_async.backends.megatron.families import bridge_fixes\n"
        "from miles_async.backends.megatron import host\n"
        "host.install(on_cpu=False)\n"
        "import sys, torch, megatron.bridge, megatron.core.extensions.transformer_engine as te\n"
        "bridge_fixes.apply()\n"
        "from miles_async.backends.megatron import backend\n"
        "assert 'transformer_engine' not in sys.modules, 'a stand-in is visible'\n"
        "assert not te.HAVE_TE\n"
        "assert te.torch is torch, 'modules have a view of torch, as on a CPU'"
    ),
    "installed": (
        "from miles_async.backends.megatron import host\n"
        "host.install(on_cpu=True), host.install(on_cpu=True)\n"
        "import sys, torch, megatron.bridge, megatron.core.extensions.transformer_engine as te\n"
        "assert 'transformer_engine' not in sys.modules \\\n"
        " and getattr(sys.modules.get('triton'), '__file__', 1), 'a stand-in is visible'\n"
        "assert not te.HAVE_TE and not torch.cuda.is_available()\n"
        "assert te.torch is not torch and torch.zeros(1).cuda().device.type == 'cpu'"
    ),
    "triton": HIDE_TRITON
    + (
        "from importlib import import_module\n"
        "from miles_async.backends.megatron.host.absent_modules import TRITON_USERS\n"
        "for name in TRITON_USERS:\n"
        "    try: import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
    ),
}
FRESH["installed without triton"] = HIDE_TRITON + FRESH["installed"]
Fresh = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def fresh(tmp_path: Path, common_imports: ForkServer) -> Fresh:
    """Name → exit status and output of that program, in a process that has imported torch and transformers alone."""
    return lambda name: run_forked(common_imports, tmp_path / "fresh.py", FRESH[name])


@pytest.mark.long
@without_cuda
def test_megatron_core_still_asks_for_cuda_devices(fresh: Fresh) -> None:
    """host.device_views."""
    assert fresh("core").returncode != 0
    assert 'device="cuda"' in source_of("megatron.core.pipeline_parallel.schedules")


@pytest.mark.long
@without_cuda
@pytest.mark.skipif(bool(importlib.util.find_spec("transformer_engine")), reason="Transformer Engine is installed")
def test_bridge_still_imports_transformer_engine_unconditionally(fresh: Fresh) -> None:
    """host.absent_modules."""
    done = fresh("bridge")
    assert done.returncode != 0
    assert "transformer_engine" in done.stderr or "triton" in done.stderr


@pytest.mark.long
def test_core_still_imports_triton_unconditionally(fresh: Fresh) -> None:
    """host.absent_modules."""
    done = fresh("triton")
    assert done.stdout.split() == ["triton"] * len(TRITON_USERS), done.stderr


@without_cuda
@pytest.mark.parametrize("program", ["installed", "installed without triton"])
def test_install_lets_bridge_import_and_hides_the_stand_ins(fresh: Fresh, program: str) -> None:
    done = fresh(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@without_cuda
@pytest.mark.skipif(bool(importlib.util.find_spec("transformer_engine")), reason="Transformer Engine is installed")
def test_a_gpu_machine_without_transformer_engine_can_import_all_that_a_rank_does(fresh: Fresh) -> None:
    done = fresh("stand-ins")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "text"),
    [
        # host.patches
        ("megatron.core.tensor_parallel.random", "torch.cuda.set_rng_state"),
        ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
        ("megatron.core.optimizer.distrib_optimizer", "torch.cuda.FloatTensor"),
        ("megatron.core.transformer.moe.moe_utils", "def maybe_move_tensor_to_cpu"),
        ("megatron.core.jit", "jit_fuser = torch.compile"),
        ("megatron.core.tensor_parallel.mappings", "torch.distributed.all_gather(output_tensor_list, input_"),
        ("megatron.core.ssm.gated_delta_net.common", "cu_seqlens is not supported for torch_chunk_gated_delta_rule"),
        ("megatron.core.ssm.mamba_mixer", "if not HAVE_MAMBA_SSM:"),
        (
            "megatron.core.ssm.mamba_context_parallel",
            "tex.thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size",
        ),
        ("megatron.core.models.hybrid.hybrid_block", "self.final_norm = TENorm("),  # host/hybrid_spec.py
        # host/spec.py: gated delta nets are of Transformer Engine only; GateNorm: its weight is whole on every rank
        ("megatron.core.models.gpt.gpt_layer_specs", "assert config.experimental_attention_variant is None"),
        ("megatron.core.distributed.finalize_model_grads", '("q_layernorm" in name or "k_layernorm" in name)'),
        # optimizer.make_state
        ("megatron.core.optimizer.__init__", "opt.initialize_state(p)"),
        # optimizer.load_state
        ("megatron.core.optimizer.distrib_optimizer", 's["step"] = step'),
        ("megatron.core.optimizer.distrib_optimizer", "for key in dst_tensors:"),
        # bridge_fixes
        ("megatron.bridge.models.conversion.param_mapping", "hf_weights.data -= 1"),
        ("megatron.bridge.models.gemma.gemma3_provider", "embeddings * (self.config.hidden_size**0.5)"),
        # gemma4_bridge
        ("megatron.bridge.models.gemma.gemma4_provider", "currently supports PP=1 only"),
        ("megatron.bridge.models.gemma.modeling_gemma4", "core_attention = Gemma4TEDotProductAttention"),
        ("megatron.bridge.models.minimax_m2.minimax_m2_provider", "dist.all_reduce(local_ss, op=dist.ReduceOp.SUM"),
        ("megatron.bridge.models.olmoe.olmoe_provider", "* self.config.num_attention_heads,  # Main difference"),
        # checkpoint_writer
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", "mp.get_context(mp_mode)"),
        # host/spec.py: ExpertRowParallelLinear
        ("megatron.core.transformer.mlp", "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)"),
        ("megatron.core.tensor_parallel.layers", 'setattr(self.bias, "sequence_parallel", self.sequence_parallel)'),
        # families.FAMILIES: experts of gpt-oss cannot be split; its constants are those of the published models
        ("megatron.bridge.models.gpt_oss.gpt_oss_bridge", "class GPTOSSMLPGateUpProjMapping(AutoMapping)"),
        ("megatron.bridge.models.gpt_oss.gpt_oss_bridge", 'expert_weight, target_param.shape, "gate_up_proj")'),
        ("megatron.bridge.models.gpt_oss.gpt_oss_bridge", "provider.yarn_rotary_scaling_factor = 32.0"),
    ],
)
def test_patched_code_is_still_there(module: str, text: str) -> None:
    assert text in source_of(module), f"{module} no longer has {text!r}: can its patch go?"


def test_transformers_still_does_not_know_kimi_k2() -> None:
    """bridge_fixes."""
    assert '"kimi_k2"' not in source_of("transformers.models.auto.auto_mappings")


# ------------------------------------------------------------------------------- without one of the patches
MakeBackend = Callable[..., MegatronBackend]
BACKEND = "miles_async.backends.megatron"
TENSOR, EXPERT = Layout(2, tensor=2), Layout(2, tensor=2, expert=2, expert_tensor=1)
PROVIDER_FIELDS = {  # that model.make_provider and provider_fields set, as the bridge does not
    "qwen3": ["perform_initialization"],
    "moonlight": ["rope_type"],
    "gemma2": ["softmax_scale", "window_attn_skip_freq", "cp_comm_type"],
    "gemma3": ["interleaved_attn_pattern", "window_attn_skip_freq"],
    "olmoe": ["moe_router_pre_softmax"],
    "gpt-oss": ["activation_func_clamp_value", "yarn_rotary_scaling_factor"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compat")
    for family in PROVIDER_FIELDS:
        save_tiny(family, root / family, **({"norm_topk_prob": True} if family == "olmoe" else {}))
    save_tiny("glm4-moe", root / "glm4-moe", dtype="bfloat16")
    return root


@pytest.fixture(scope="module")
def without(models: Path) -> dict[str, Any]:
    """Observations of rank 0 when a patch is absent, by the patch's name; or a traceback."""
    return {patch: seen for (_, patch), seen in run_ranks(2, _without_patches, models)[0].items()}


def test_bridge_still_cannot_name_experts(without: dict[str, Any]) -> None:
    """bridge_fixes: SequentialMLP's, of GLM-4.5 and OLMoE; coverage notices."""
    assert "tensors of the checkpoint that the model has no place for: model.layers.1.mlp.experts" in without["experts"]


def test_optimizer_still_misplaces_the_state_of_mixed_groups(without: dict[str, Any]) -> None:
    """optimizer.index_groups."""
    assert "must match the size of tensor" in without["index_groups"]


def test_optimizer_still_cannot_be_saved_before_its_first_step(without: dict[str, Any]) -> None:
    """optimizer.make_state."""
    assert "AssertionError" in without["make_state"]


def test_split_down_projections_still_lose_gradients(without: dict[str, object], models: Path) -> None:
    """LatentAttention of host/spec.py, at TP 2."""
    plain = PlainTrainer(models / "moonlight", lr=0.0).train([toy_samples(8)])
    assert without["LatentAttention"] != pytest.approx(plain["grad_norm"], rel=1e-4)


def test_gloo_still_refuses_to_gather_different_lengths(without: dict[str, Any]) -> None:
    """host.patches."""
    assert "invalid tensor size" in without["uneven gather"]


def test_provider_still_misses_fields_that_we_set(without: dict[str, Any]) -> None:
    """model.make_provider and provider_fields."""
    assert without["provider fields"] == {
        "qwen3": {"perform_initialization": False},
        "moonlight": {"rope_type": "yarn"},
        "gemma2": {"softmax_scale": None, "window_attn_skip_freq": None, "cp_comm_type": None},
        "gemma3": {"interleaved_attn_pattern": (5, 1), "window_attn_skip_freq": None},  # whatever config.json has
        "olmoe": {"moe_router_pre_softmax": True},
        "gpt-oss": {"activation_func_clamp_value": 7.0, "yarn_rotary_scaling_factor": 32.0},
    }


# ------------------------------------------------------------------------------------------- in the ranks
def _without_patches(rank: int, world_size: int, store: dist.Store, models: Path) -> dict[Case, Any]:
    from miles_async.backends.megatron import host

    host.install(on_cpu=True)

    def observe(store: dist.Store, case: Case) -> object:
        return WITHOUT[case[1]](partial(make_backend, rank, world_size, store), models)

    return each_case([("without", name) for name in WITHOUT], store, observe)


def _experts(make: MakeBackend, models: Path) -> list[str]:
    with patch(f"{BACKEND}.families.bridge_fixes.apply"):
        return _differences(make(models / "glm4-moe", EXPERT, bf16=True), models / "glm4-moe")


def _index_groups(make: MakeBackend, models: Path) -> str:
    with (
        patch(f"{BACKEND}.optimizer.index_groups"),
        patch(f"{BACKEND}.model.dtypes.KEPT_IN_FP32", (".expert_bias", ".router.weight")),
    ):
        backend = make(models / "glm4-moe", EXPERT, bf16=True)
    with pytest.raises(CheckpointError) as caught:
        backend.save(models / "index_groups")
    backend.close()
    return str(caught.value)


def _make_state(make: MakeBackend, models: Path) -> str:
    with patch(f"{BACKEND}.optimizer.make_state"):
        backend = make(models / "qwen3", TENSOR)
    with pytest.raises(CheckpointError) as caught:
        backend.save(models / "make_state")
    backend.close()
    return repr(caught.value)


def _latent_attention(make: MakeBackend, models: Path) -> float:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    with patch(f"{BACKEND}.host.spec.LatentAttention", MLASelfAttention):
        backend = make(models / "moonlight", EXPERT)
    norm = backend.train(to_shards([toy_samples(8)], dp_size=1, micro_batches=1)[0])["grad_norm"]
    backend.close()
    return norm


def _uneven_gather(make: MakeBackend, models: Path) -> str:
    backend = make(models / "qwen3", TENSOR)
    lengths = [1, 2]
    with pytest.raises(RuntimeError) as caught:
        dist.all_gather([torch.empty(length) for length in lengths], torch.ones(lengths[dist.get_rank()]))
    backend.close()
    return str(caught.value)


def _provider_fields(make: MakeBackend, models: Path) -> dict[str, dict[str, object]]:
    from megatron.bridge import AutoBridge

    found = {}
    for family, names in PROVIDER_FIELDS.items():
        provider = AutoBridge.from_hf_pretrained(str(models / family)).to_megatron_provider(load_weights=True)
        found[family] = {name: getattr(provider, name) for name in names}
    return found


def _differences(backend: MegatronBackend, directory: Path) -> list[str]:
    differences = export_differences(backend, directory)
    backend.close()
    return differences


WITHOUT: dict[str, Callable[[MakeBackend, Path], Any]] = {
    "experts": _experts,  # fixes of the bridge cannot be taken back: their absence comes first
    "index_groups": _index_groups,
    "make_state": _make_state,
    "LatentAttention": _latent_attention,
    "uneven gather": _uneven_gather,
    "provider fields": _provider_fields,
}


def source_of(module: str) -> str:
    """Without importing it."""
    root = importlib.util.find_spec(".".join(module.split(".")[:2]))
    assert root is not None
    assert root.origin is not None
    path = Path(root.origin).parent.joinpath(*module.split(".")[2:]).with_suffix(".py")
    return path.read_text()
