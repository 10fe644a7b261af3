"""Flags of other systems: what becomes of each, by one table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.arguments.foreign.checks import check_foreign, layer_kinds
from miles_async.arguments.foreign.record import ForeignFlag
from miles_async.arguments.foreign.shapes import SHAPES
from miles_async.arguments.foreign.slime import FULLY_ASYNC_LOOPS
from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.parser import ParsedCommandLine, build_parser, parse_arguments
from miles_async.arguments.pass_through import is_pass_through
from tests.unit.arguments.refusals import refusal

OURS = list(build_parser("miles-async train")._option_string_actions)
CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
_GLM = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 192 --v-head-dim 256 --kv-channels 192 --qk-layernorm "
    "--no-position-embedding --moe-router-score-function sigmoid --moe-router-pre-softmax "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size "
)
_HYBRID = (
    "--qk-layernorm --apply-layernorm-1p --attention-output-gate --rotary-percent 0.25 --kv-channels 256 "
    "--linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-num-value-heads 32 "
)
FAMILY_FLAGS = {
    "gpt-oss-20b": "--softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2 --rope-type yarn",
    "gpt-oss-120b": "--window-size 127,0 --beta-fast 32 --beta-slow 1 --original-max-position-embeddings 4096",
    "Llama-3.1-8B-Instruct": "--use-rope-scaling --rope-scaling-factor 8 --rotary-base 500000 --rope-type rope",
    "DeepSeek-R1": "--rope-type yarn --original-max-position-embeddings 4096 --beta-fast 32 --beta-slow 1.0",
    "GLM-4.7-Flash": _GLM + "1536 --add-qkv-bias --moe-layer-freq [0]*1+[1]*46 --make-vocab-size-divisible-by 64",
    "GLM-5": _GLM + "2048 --moe-layer-freq [0]*3+[1]*75 --enable-experimental",
    "DeepSeek-V3.2": "--qk-layernorm --moe-router-enable-expert-bias --kv-channels 128 --position-embedding-type rope",
    "MiniMax-M2": "--qk-layernorm --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--rotary-percent 0.5",
    "Qwen3-Next-80B-A3B": _HYBRID + "--use-gated-attention --moe-shared-expert-gate --num-experts 512",
    "Qwen3.5-4B": _HYBRID + "--num-layers 32",
    "Qwen3.5-35B-A3B": _HYBRID + "--moe-shared-expert-gate --moe-shared-expert-intermediate-size 512",
    "Qwen3-VL-30B-A3B-Instruct": "--qk-layernorm --use-rotary-position-embeddings --init-method-std 0.02",
    "gemma-4-26B-A4B-it": "--qk-layernorm --use-rotary-position-embeddings --kv-channels 256 --num-experts 128",
    "Nemotron-3-Nano-30B-A3B": "--normalization RMSNorm --position-embedding-type none --squared-relu "
    "--transformer-impl local --mamba-num-heads 64 --mamba-state-dim 128 --mamba-num-groups 8 "
    "--moe-shared-expert-intermediate-size 3712",
}


def parse(*words: str) -> ParsedCommandLine:
    return parse_arguments(words)


def rows(verdict: str) -> list[ForeignFlag]:
    return [row for row in FOREIGN_FLAGS.values() if row.verdict == verdict]


def by_flag(verdict: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows(verdict), ids=lambda row: row.flag)


def value_of(row: ForeignFlag) -> list[str]:
    return [] if row.takes == "nothing" else [row.only[0] if row.only else "1"]


class TestTable:
    """# covers: P8"""

    def test_no_flag_is_ours_and_foreign(self):
        assert not set(OURS) & set(FOREIGN_FLAGS)
        assert {flag for flag, _ in FOREIGN_VALUES} <= set(OURS)

    def test_flags_that_rows_name_exist(self):
        texts = [row.note for row in FOREIGN_FLAGS.values()] + [row.note for row in FOREIGN_VALUES.values()]
        texts += [word for row in FOREIGN_FLAGS.values() for word in row.ours]
        named = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]*\w", text)}
        unknown = {flag for flag in named if flag not in OURS and not is_pass_through(flag, OURS)}
        assert {flag for flag in unknown if next(as_megatron_flags([flag], OURS)) == flag} == set()

    @by_flag("refused")
    def test_refused_says_why_and_what_to_do(self, row: ForeignFlag):
        assert refusal(row.flag, *value_of(row)) == f"{row.flag} does not exist here: {row.note}"

    @by_flag("noted")
    def test_noted_changes_nothing_and_says_why(self, row: ForeignFlag):
        parsed = parse(row.flag, *value_of(row))
        assert parsed.arguments == Arguments()
        assert parsed.notes == (f"{' '.join([row.flag, *value_of(row)])} changes nothing: {row.note}",)

    @by_flag("works")
    def test_works_sets_something(self, row: ForeignFlag):
        assert parse(row.flag, *value_of(row)).arguments != Arguments()

    @by_flag("checked")
    def test_checked_is_kept_for_the_check(self, row: ForeignFlag):
        parsed = parse(row.flag, *value_of(row))
        assert parsed.arguments == Arguments()
        assert list(parsed.checks) == [row.flag]

    @pytest.mark.parametrize("row", [row for row in FOREIGN_FLAGS.values() if row.only], ids=lambda row: row.flag)
    def test_another_value_than_the_one_that_holds_is_refused(self, row: ForeignFlag):
        assert refusal(row.flag, "37") == f"{row.flag} 37: expected {' or '.join((*row.only, *row.idle))}: {row.note}"


class TestTranslation:
    def test_numbers_are_compared_as_numbers(self):
        assert "--lora-dropout 0.00 changes nothing" in parse("--lora-dropout", "0.00").notes[0]
        assert parse("--lora-dropout=0").notes
        assert "expected 0: engines have no dropout" in refusal("--lora-dropout", "0.01")

    def test_the_last_mention_counts(self):
        words = ["--moe-token-dispatcher-type", "alltoall", "--moe-token-dispatcher-type"]
        assert len(parse(*words, "flex").notes) == 1
        assert len(parse("--moe-token-dispatcher-type", "allgather", *words[:2]).notes) == 1
        assert "expected alltoall or flex" in refusal(*words, "allgather")
        assert refusal(*words, "allgather", "--moe-token-dispatcher-type", "allgather").count("allgather") == 1

    @pytest.mark.parametrize("form", ["{} {}", "{}={}"])
    def test_the_last_value_counts_of_flags_that_are_ours(self, form: str):
        def given(flag: str, *values: str) -> list[str]:
            return " ".join(form.format(flag, value) for value in values).split()

        parsed = parse(*given("--advantage-estimator", "gspo", "grpo"))
        assert (parsed.arguments.algorithm.policy_loss, parsed.notes) == (AlgorithmArguments().policy_loss, ())
        algorithm = parse(*given("--advantage-estimator", "grpo", "gspo")).arguments.algorithm
        assert (algorithm.advantage_estimator, algorithm.policy_loss) == ("grpo", "gspo")
        assert parse(*given("--train-backend", "fsdp", "megatron")).arguments.model.train_backend == "megatron"
        assert parse(*given("--loss-type", "custom_loss", "sft_loss")).arguments.algorithm.supervised
        assert "--loss-type custom_loss does not exist" in refusal(*given("--loss-type", "sft_loss", "custom_loss"))

    def test_what_follows_a_value_is_not_swallowed(self):
        assert "unexpected argument '7'" in refusal("--balance-data", "7")
        assert "unexpected argument '7'" in refusal("--num-layers", "36", "7")
        assert "unexpected argument '7'" in refusal("--num-layers", "36", "7", "--num-layers", "36")
        assert "unexpected argument '7'" in refusal("--loss-type", "sft_loss", "7", "--loss-type", "sft_loss")
        assert "--num-layers: expected one argument" in refusal("--num-layers", "--lr", "1")

    @pytest.mark.parametrize("word", ["-:", "--x"])
    def test_a_value_may_look_like_a_flag(self, word: str):
        assert parse(f"--train-backend={word}").arguments.model.train_backend == word
        assert parse(f"--rollout-stop={word}").arguments.rollout.rollout_stop == (word,)

    def test_another_name_for_a_flag_of_ours(self):
        arguments = parse("--sglang-server-concurrency", "64", "--lr", "1").arguments
        assert arguments.rollout.rollout_concurrency_per_engine == 64
        assert arguments.engines.sglang_extra == ()

    def test_engines_of_miles_that_run_already(self):
        words = ["--rollout-external-engine-addrs", "a:1", "b:2", "--rollout-external"]
        assert parse(*words).arguments.engines.rollout_external == ("a:1", "b:2")

    def test_changes_of_weights_by_files(self):
        words = "--update-weight-mode delta --update-weight-transport disk --update-weight-delta-encoding xor".split()
        parsed = parse(*words, "--update-weight-disk-dir", "/shared", "--update-weight-local-checkpoint-dir", "/nvme")
        weights = parsed.arguments.weights
        assert (weights.weight_delta, weights.weight_transport) == ("xor", "disk")
        assert weights.weight_staging_dir == Path("/shared")
        assert len(parsed.notes) == 2
        weights = parse("--update-weight-transfer-mode", "disk-delta").arguments.weights
        assert (weights.weight_delta, weights.weight_transport) == ("xor", "disk")
        assert parse("--update-weight-transfer-mode", "p2p").arguments == Arguments()
        assert parse("--update-weight-mode", "full", "--update-weight-transport", "nccl").arguments == Arguments()
        assert "expected delta or full" in refusal("--update-weight-mode", "half")
        assert "--weight-delta overwrite" in refusal("--update-weight-delta-encoding", "overwrite")

    def test_flags_that_sglang_renamed(self):
        words = ["--sglang-nsa-decode-backend", "fa3", "--sglang-mamba-scheduler-strategy", "extra_buffer"]
        renamed = ("--dsa-decode-backend", "fa3", "--mamba-radix-cache-strategy", "extra_buffer")
        assert parse(*words).arguments.engines.sglang_extra == renamed

    def test_a_filter_by_its_path(self):
        path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
        assert parse("--dynamic-sampling-filter-path", path).arguments.rewards.group_filter == ("zero_variance",)
        assert "--group-filter-path" in refusal("--dynamic-sampling-filter-path", "mine.filter")

    @pytest.mark.parametrize("path", FULLY_ASYNC_LOOPS)
    def test_a_loop_that_every_run_has(self, path: str):
        parsed = parse("--rollout-function-path", path)
        assert parsed.arguments == Arguments()
        (note,) = parsed.notes
        assert note.startswith(f"--rollout-function-path {path} changes nothing: generation never waits")
        assert "another loop cannot be put in" in refusal(
            "--rollout-function-path", "mine.generate_rollout_fully_async"
        )

    @pytest.mark.parametrize(
        ("name", "estimator", "by_deviation"),
        [("reinforce_plus_plus", "reinforce", True), ("reinforce_plus_plus_baseline", "grpo", False)],
    )
    def test_estimators_of_slime_that_whiten(self, name: str, estimator: str, by_deviation: bool):
        algorithm = parse("--advantage-estimator", name).arguments.algorithm
        assert (algorithm.advantage_estimator, algorithm.normalize_advantages) == (estimator, True)
        assert algorithm.grpo_std_normalization is by_deviation

    @pytest.mark.parametrize("words", [["--rm-type", "deepscaler"], ["--rm-type=deepscaler"]])
    def test_values_of_other_systems_for_flags_of_ours(self, words: list[str]):
        parsed = parse(*words)
        assert parsed.arguments.rewards.rm_type == "math"
        assert "--rm-type deepscaler is taken as --rm-type math" in parsed.notes[0]

    def test_refused_values_say_what_to_do(self):
        wanted = "--lora-type canonical_lora does not exist here: projections that Megatron computes as one layer"
        assert wanted in refusal("--lora-type", "canonical_lora")


DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000},
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}
MIXTURE = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0},
}


def disagreements(tmp_path: Path, config: dict[str, object], *words: str) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = Arguments(
        model=ModelArguments(hf_checkpoint=tmp_path), cluster=ClusterArguments(rollout_num_gpus_per_engine=4)
    )
    return list(check_foreign(arguments, parse(*words).checks))


class TestChecks:
    """Flags that describe the model agree with config.json of ``--hf-checkpoint``."""

    def test_a_model_that_agrees(self, tmp_path: Path):
        words = (
            "--num-layers 36 --hidden-size 2560 --group-query-attention --num-query-groups 8 --kv-channels 128 "
            "--swiglu --normalization RMSNorm --norm-epsilon 0.000001 --rotary-base 1e6 --rotary-percent 1.0 "
            "--qk-layernorm --disable-bias-linear --sglang-tp-size 4 --rollout-stop-token-ids 5"
        )
        assert disagreements(tmp_path, DENSE, *words.split()) == []

    def test_a_mixture_that_agrees(self, tmp_path: Path):
        words = (
            "--moe-layer-freq [0]*1+[1]*3 --num-experts 16 --moe-shared-expert-intermediate-size 128 --kv-channels 16 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --multi-latent-attention "
            "--rotary-scaling-factor 40 --mscale 1 --untie-embeddings-and-output-weights"
        )
        assert disagreements(tmp_path, MIXTURE, *words.split()) == []

    @pytest.mark.parametrize(
        ("words", "source"),
        [
            ("--num-layers 40", "config.json of --hf-checkpoint says num_hidden_layers 36"),
            ("--rotary-base 10000", "rope_parameters.rope_theta 1000000"),
            ("--rotary-percent 0.5", "nothing of partial_rotary_factor, which means 1.0"),
            ("--kv-channels 80", "head_dim 128"),
            ("--normalization LayerNorm", "rms_norm_eps"),
            ("--add-qkv-bias", "model_type 'qwen3' and attention_bias None"),
            ("--post-mlp-layernorm", "model_type 'qwen3'"),
            ("--rotary-interleaved", "model_type 'qwen3'"),
            ("--multi-latent-attention", "nothing of kv_lora_rank"),
            ("--untie-embeddings-and-output-weights", "tie_word_embeddings True"),
            ("--num-query-groups 4", "num_key_value_heads 8"),
            ("--num-experts 128", "nothing of num_experts, which means 0"),
            ("--moe-layer-freq [1]*36", "nothing of num_experts, which means 0"),
            ("--moe-layer-freq 1", "nothing of num_experts, which means 0"),
            ("--moe-ffn-hidden-size 768", "nothing of num_experts, which means 0"),
            (
                "--moe-shared-expert-intermediate-size 768",
                "nothing of shared_expert_intermediate_size, which means none",
            ),
            ("--moe-router-topk 8", "nothing of num_experts_per_tok, which means 0"),
            ("--moe-router-topk-scaling-factor 2.5", "nothing of routed_scaling_factor, which means 1.0"),
            ("--moe-router-num-groups 8", "nothing of n_group, which means 1"),
            ("--moe-router-group-topk 4", "nothing of topk_group, which means 1"),
            ("--moe-router-score-function sigmoid", "model_type 'qwen3'"),
            ("--moe-router-pre-softmax", "nothing of num_experts, which means 0"),
            ("--moe-router-enable-expert-bias", "model_type 'qwen3'"),
            ("--rotary-scaling-factor 40", "nothing of rope_scaling.factor, which means 1.0"),
            ("--position-embedding-type yarn", "nothing of rope_scaling.rope_type, which means default"),
            ("--mscale 0.7", "nothing of rope_scaling.mscale, which means 1.0"),
            ("--rope-type yarn", "nothing of rope_scaling.rope_type, which means default"),
            (
                "--original-max-position-embeddings 4096",
                "nothing of rope_scaling.original_max_position_embeddings, which means none",
            ),
            ("--use-rope-scaling", "nothing of rope_scaling.rope_type, which means default"),
            ("--rope-scaling-factor 8", "nothing of rope_scaling.factor, which means none"),
            ("--beta-fast 1", "nothing of rope_scaling.beta_fast, which means 32.0"),
            ("--beta-slow 2", "nothing of rope_scaling.beta_slow, which means 1.0"),
            ("--window-size 128,0", "sliding_window None"),
            ("--window-attn-skip-freq 2", "layer_types"),
            ("--softmax-type learnable", "model_type 'qwen3'"),
            ("--moe-latent-size 1024", "nothing of moe_latent_size, which means none"),
            ("--mscale-all-dim 1", "nothing of rope_scaling.mscale_all_dim, which means 0.0"),
            ("--q-lora-rank 1536", "nothing of q_lora_rank, which means none"),
            ("--kv-lora-rank 512", "nothing of kv_lora_rank, which means none"),
            ("--qk-head-dim 128", "nothing of qk_nope_head_dim, which means none"),
            ("--qk-pos-emb-head-dim 64", "nothing of qk_rope_head_dim, which means none"),
            ("--v-head-dim 128", "nothing of v_head_dim, which means none"),
            ("--sglang-tp-size 8", "--rollout-num-gpus-per-engine, which is an engine's tensor-parallel size, is 4"),
            ("--rollout-stop-token-ids 5 6", "eos_token_id is that of config.json 5"),
        ],
    )
    def test_one_that_does_not_is_named_with_its_field(self, tmp_path: Path, words: str, source: str):
        (found,) = disagreements(tmp_path, DENSE, *words.split())
        assert found.startswith(f"{words}: ")
        assert source in found
        assert found.endswith("change one of them, or leave the flag out")

    def test_what_config_json_does_not_say_is_not_compared(self, tmp_path: Path):
        assert disagreements(tmp_path, DENSE, "--vocab-size", "7") == []

    @pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
    def test_experts_by_their_name_in_each_family(self, tmp_path: Path, field: str):
        config = {"model_type": "olmoe", field: 8, "intermediate_size": 64, "norm_topk_prob": False}
        words = "--num-experts 8 --moe-ffn-hidden-size 64 --moe-router-num-groups 1 --moe-router-pre-softmax"
        assert disagreements(tmp_path, config, *words.split()) == []
        assert len(disagreements(tmp_path, config, "--num-experts", "16", "--moe-router-group-topk", "2")) == 2

    @pytest.mark.parametrize(
        ("words", "source"),
        [
            ("--moe-router-pre-softmax", "norm_topk_prob True"),
            ("--moe-router-topk-scaling-factor 2.5", "nothing of routed_scaling_factor, which means 1.0"),
            ("--moe-shared-expert-intermediate-size 64", "shared_expert_intermediate_size, which means none"),
        ],
    )
    def test_a_mixture_that_does_not_agree(self, tmp_path: Path, words: str, source: str):
        config = {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True}
        (found,) = disagreements(tmp_path, config, *words.split())
        assert source in found

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (DENSE, "--rotary-scaling-factor 1 --mscale 1 --mscale-all-dim 0 --position-embedding-type rope"),
            (DENSE, "--num-experts 0 --moe-layer-freq [0]*36 --mtp-num-layers 0 --moe-router-num-groups 1"),
            (DENSE, "--moe-router-topk-scaling-factor 1 --moe-router-score-function softmax"),
            (DENSE, "--beta-fast 32 --beta-slow 1 --rope-type rope --softmax-type vanilla"),
            (MIXTURE, "--position-embedding-type rope"),
            (MIXTURE, "--position-embedding-type yarn --moe-router-pre-softmax"),
        ],
    )
    def test_values_that_mean_the_same_as_nothing(self, tmp_path: Path, config: dict[str, object], words: str):
        assert disagreements(tmp_path, config, *words.split()) == []

    @pytest.mark.parametrize("name", FAMILY_FLAGS)
    def test_model_files_of_other_systems_agree_with_their_models(self, tmp_path: Path, name: str):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        assert disagreements(tmp_path, config, *FAMILY_FLAGS[name].split()) == []

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("Nemotron-3-Nano-30B-A3B", "--use-rotary-position-embeddings"),
            ("Nemotron-3-Nano-30B-A3B", "--position-embedding-type rope"),
            ("Nemotron-3-Nano-30B-A3B", "--swiglu"),
            ("Qwen3-4B", "--position-embedding-type none"),
            ("Qwen3-4B", "--apply-layernorm-1p"),
            ("Qwen3-4B", "--squared-relu"),
            ("Qwen3-4B", "--attention-output-gate"),
            ("Qwen3.5-4B", "--moe-shared-expert-gate"),
            ("Qwen3.5-4B", "--linear-num-key-heads 32"),
            ("GLM-5", "--kv-channels 128"),
            ("gpt-oss-20b", "--moe-router-enable-expert-bias"),
            ("gpt-oss-20b", "--window-size 4096,0"),
            ("gpt-oss-20b", "--window-attn-skip-freq 4"),
            ("gpt-oss-20b", "--softmax-type vanilla"),
            ("DeepSeek-R1", "--rope-type rope"),
            ("DeepSeek-R1", "--use-rope-scaling"),
            ("Llama-3.1-8B-Instruct", "--rope-scaling-factor 32"),
            ("DeepSeek-R1", "--beta-fast 1"),
            ("Qwen3-14B", "--window-size 4096,0"),
            ("Llama-3.1-8B-Instruct", "--window-attn-skip-freq 1"),
        ],
    )
    def test_model_files_of_another_model_do_not(self, tmp_path: Path, name: str, words: str):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        (found,) = disagreements(tmp_path, config, *words.split())
        assert found.startswith(words)

    def test_end_tokens_of_the_generation_config_count(self, tmp_path: Path):
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
        assert disagreements(tmp_path, DENSE, "--rollout-stop-token-ids", "5", "6", "7") == []

    @pytest.mark.parametrize("model", ["Qwen3-4B", "Qwen3-30B-A3B", "DeepSeek-R1", "GLM-4.5", "gpt-oss-20b"])
    def test_every_flag_that_describes_a_model_is_compared(self, model: str):
        config = json.loads((CONFIGS / f"{model}.json").read_text())
        unsaid = [row.flag for row in SHAPES if row.fact is None or row.fact(Arguments(), config) is None]
        assert unsaid == (["--moe-router-pre-softmax"] if model == "gpt-oss-20b" else [])

    @pytest.mark.parametrize("text", ["[0", "__import__('os')", "[0]*'a'", "0", "'x'"])
    def test_layers_that_cannot_be_read(self, text: str):
        with pytest.raises(ValueError, match="expected a list such as"):
            layer_kinds(text, 4)
