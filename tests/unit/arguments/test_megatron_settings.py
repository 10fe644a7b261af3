"""``--megatron-X``: fields of Megatron's configs, by the source of the installed version."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_async.arguments.megatron_fields import megatron_fields
from miles_async.arguments.megatron_settings import MegatronSettings, megatron_settings
from miles_async.arguments.parser import parse_arguments
from tests.unit.arguments.refusals import refusal


def settings(*words: str) -> MegatronSettings:
    return megatron_settings(parse_arguments(words).arguments.model.megatron_extra)


def test_values_have_the_field_s_type_and_reach_its_configs() -> None:
    found = settings(
        "--megatron-bucket-size", "4096", "--megatron-decoupled-lr=1e-5", "--megatron-overlap-grad-reduce",
        "--megatron-moe-permute-fusion", "false", "--megatron-exp-avg-dtype", "bf16",
        "--megatron-attention-backend", "flash", "--megatron-offload-modules", "core_attn",
    )  # fmt: skip
    assert found.provider == {
        "moe_permute_fusion": False,
        "attention_backend": "flash",
        "offload_modules": ["core_attn"],
    }
    assert found.optimizer == {"decoupled_lr": 1e-5, "exp_avg_dtype": "bf16"}
    assert found.ddp == {"bucket_size": 4096, "overlap_grad_reduce": True}


def test_a_field_s_own_name_is_enough_and_no_turns_a_switch_off() -> None:
    found = settings("--moe-permute-fusion", "--no-masked-softmax-fusion", "--optimizer-cpu-offload", "--bucket-size=8")
    assert found.provider == {"moe_permute_fusion": True, "masked_softmax_fusion": False}
    assert (found.optimizer, found.ddp) == ({"optimizer_cpu_offload": True}, {"bucket_size": 8})


def test_a_field_of_several_configs_is_set_in_each() -> None:
    found = settings("--overlap-grad-reduce", "--overlap-param-gather")
    assert found.optimizer == {"overlap_param_gather": True}
    assert found.ddp == {"overlap_grad_reduce": True, "overlap_param_gather": True}


def test_other_names_of_megatron_s_command_line() -> None:
    assert settings("--no-rope-fusion").provider == {"apply_rope_fusion": False}


def test_kernels_of_sparse_attention_can_be_chosen_and_its_shape_cannot() -> None:
    assert settings("--megatron-dsa-kernel-backend", "cudnn").provider == {"dsa_kernel_backend": "cudnn"}
    assert "the model is built by config.json" in refusal("--megatron-dsa-indexer-topk", "64")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--megatron-moe-permute-fusin"], "no field moe_permute_fusin; did you mean --megatron-moe-permute-fusion?"),
        (["--grad-norm-skip-threshold", "5"], "use --grad-norm-limit"),
        (["--mtp-detach-heads"], "it always is on"),
        (["--megatron-zzz", "1"], "no field zzz; `miles-async train --help-megatron` lists them"),
        (["--megatron-bucket-size", "big"], "--megatron-bucket-size: expected int|none, found 'big'"),
        (["--megatron-bucket-size", "1", "2"], "expected int|none, found 1 2"),
        (["--megatron-bucket-size"], "expected int|none, found nothing"),
        (["--megatron-exp-avg-dtype", "fp64"], "expected dtype (fp32, bf16, fp16, fp8), found 'fp64'"),
        (["--megatron-attention-backend", "fast"], "expected flash|fused|unfused|local|auto, found 'fast'"),
        (["--megatron-init-method", "x"], "it cannot be set on a command line"),
        (["--megatron-tensor-model-parallel-size", "2"], "use --tensor-model-parallel-size"),
        (["--megatron-lr", "2"], "use --lr"),
        (["--megatron-num-layers", "2"], "the model is built by config.json of --hf-checkpoint"),
        (["--megatron-layernorm-epsilon", "2"], "the model is built by config.json of --hf-checkpoint"),
        (["--megatron-params-dtype", "bf16"], "--bf16 chooses the dtypes"),
        (["--megatron-moe-aux-loss-coeff", "1"], "the policy gradient alone moves the weights: remove it"),
        (["--megatron-num-layers-in-first-pipeline-stage", "1"], "use --decoder-first-pipeline-num-layers"),
        (["--average-in-collective"], "gradients are summed and divided by the tokens that carry loss"),
        (["--num-microbatches-with-partial-activation-checkpoints", "2"], "use --recompute-granularity"),
        (["--overlap-moe-expert-parallel-comm"], "it needs a forward pass in parts"),
        (["--moe-layer-recompute"], "use --recompute-granularity selective --recompute-modules moe"),
        (
            ["--megatron-beta-fast", "32"],
            "the model is built by config.json of --hf-checkpoint",
        ),  # with latent attention only
        (["--megatron-rope-type", "yarn"], "the model is built by config.json of --hf-checkpoint"),
        (["--align-param-gather"], "it is not implemented: remove it"),
        (["--overlap-param-gather-with-optimizer-step"], "it is not implemented: remove it"),
    ],
)
def test_what_cannot_be_set_says_why(words: list[str], says: str) -> None:
    assert says in refusal(*words)


def test_what_cannot_be_set_is_reported_together() -> None:
    assert "2 problems" in refusal("--megatron-lr", "1", "--megatron-zzz", "1")


def test_without_megatron_nothing_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.arguments.megatron_settings.megatron_fields", dict)
    assert "are not installed here" in refusal("--megatron-bucket-size", "1")


def test_the_list_has_every_field_and_costs_no_import_of_torch() -> None:
    program = (
        "import sys; from miles_async.cli import main\n"
        "try: main(['train', '--help-megatron'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "--megatron-bucket-size int|none  (default: None; ddp)" in done.stdout
    assert "--megatron-tensor-model-parallel-size: use --tensor-model-parallel-size" in done.stdout
    settable = [field for field in megatron_fields().values() if field.type or field.owner]
    assert len(settable) > 200
    assert all(field.flag in done.stdout for field in settable)
