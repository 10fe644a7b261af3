"""Settings that are refused before anything starts, with messages that name the flags to change (C3, C4, C12)."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from safetensors.numpy import save_file

from miles_async.arguments import Arguments
from miles_async.arguments.parser import assemble
from miles_async.arguments.specification import FlagSpecification, flag_specifications
from miles_async.arguments.validation import range_problems, validate
from miles_async.errors import ConfigurationError
from tests.unit.arguments.refusals import refusal_of

EVALUATED = (str(Path(__file__).parents[3] / "examples" / "search_agent" / "test.jsonl"),)


@pytest.fixture
def valid(tmp_path: Path) -> dict[str, object]:
    """The fewest flags of a run that passes: asynchronous, corrected, K = 2."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 2048}'
    )
    save_file({}, model / "model.safetensors")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "rev 12", "label": "21"}\n')
    return {
        "hf_checkpoint": model,
        "prompt_data": (str(prompts),),
        "rm_type": "exact_match",
        "max_weight_staleness": 2,
        "use_rollout_logprobs": True,
    }


BOUNDED = [flag for flag in flag_specifications().values() if set(flag.bounds.values()) != {None}]
PPO = {"token_advantages": "gae", "advantage_estimator": "reinforce"}
DECOUPLED = {"use_rollout_logprobs": False, "use_tis": True}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
CONTEXT_PARALLEL = {"context_parallel_size": 2, "actor_num_gpus_per_node": 2}
SINGLE = {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce"}


def case(*change_and_messages: object) -> ParameterSet:
    """Parameters: one or more dicts, then messages."""
    dicts = [value for value in change_and_messages if isinstance(value, dict)]
    return pytest.param(*dicts, change_and_messages[len(dicts) :], id=" ".join(map(str, dicts)))


def test_the_fewest_flags_pass(valid: dict[str, object]):
    validate(assemble(valid, {}))


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        case({"hf_checkpoint": None}, "--hf-checkpoint is required"),
        case({"prompt_data": None}, "--prompt-data is required"),
        case({"hf_checkpoint": Path("absent")}, "--hf-checkpoint absent", "no such directory"),
        case({"prompt_data": ("absent.jsonl",)}, "--prompt-data absent.jsonl", "no such file"),
        case({"prompt_data": ("$HOME/a.jsonl",)}, "no such file: variables are not expanded here"),
        case({"eval_prompt_data": ("aime", "absent.jsonl")}, "--eval-prompt-data absent.jsonl"),
        case({"eval_interval": 5}, "--eval-interval 5 has no effect without --eval-"),
        case({"eval_prompt_data": ("aime",)}, "--eval-prompt-data", "after the name 'aime'"),
        case({"eval_prompt_data": ("data/aime.json",)}, "or hf:NAME; found 'data/aime.json'"),
        case(
            {"eval_prompt_data": ("a/test.jsonl", "b/test.parquet")},
            "a/test.jsonl and b/test.parquet are both called test",
        ),
        case({"debug_rollout_only": True, "debug_train_only": True}, "--debug-train-only leave each"),
        case({"debug_train_only": True}, "without --load-debug-rollout-data"),
        case({"load_debug_rollout_data": Path("a/{rollout_id}.parquet")}, "there is no file a/1.parquet"),
        case({"save_debug_rollout_data": Path("{rollout_id}.pt")}, "ends with .parquet"),
        case(
            {"save_debug_rollout_data": Path("a.parquet"), "num_rollout": 2},
            "every step would replace it; put {rollout_id}",
        ),
        case({"debug_rollout_only": True, "save": Path("checkpoints")}, "--save with --debug-rollout-only"),
        case(
            {"debug_rollout_only": True, "rollout_external": ("10.0.0.1:30000",), "verify_weights": "canary"},
            "--rollout-external with --debug-rollout-only",
        ),
        case({"host": "::1"}, "--host ::1: expected an IPv4 address or a name"),
        case({"port_range": "20000"}, "--port-range 20000: expected LOW-HIGH"),
        case({"port_range": "20009-20000"}, "--port-range 20009-20000"),
        case({"port_range": "65000-66000"}, "--port-range 65000-66000"),
        case({"port_range": "20000-20001"}, "--port-range 20000-20001: expected at least"),
        case({"ray_address": "auto", "actor_node_labels": ("pool",)}, "--actor-node-labels pool: expected"),
        case({"ray_address": "auto", "weight_transport": "disk"}, "give --weight-staging-dir"),
        case({"rollout_node_labels": ("pool=x",)}, "--rollout-node-labels without --ray-add"),
        case(
            {"eval_prompt_data": EVALUATED, "n_samples_per_eval_prompt": 4, "eval_temperature": 0.0},
            "--n-samples-per-eval-prompt 4 with --eval-temperature 0",
        ),
        case({"n_samples_per_prompt": 1}, "--n-samples-per-prompt 1", "--advantage-estimator grpo", "at least 2"),
        case({"rollout_num_gpus": 10**12}, "--rollout-num-gpus: expected at least 1 and at most 1000000"),
        case(
            {"distributed_timeout_minutes": 1e308},
            "--distributed-timeout-minutes: expected more than 0 and at most 1000000000.0",
        ),
        case({"n_samples_per_prompt": 0}, "--n-samples-per-prompt: expected at least 1"),
        case({"rollout_num_gpus_per_engine": 0}, "--rollout-num-gpus-per-engine: expected at "),
        case({"lora_rank": 4, "tensor_model_parallel_size": 0}, "--tensor-model-parallel-size: expected at least 1"),
        case(
            {"n_samples_per_prompt": 8, "min_group_fraction": 0.1},
            "--min-group-fraction 0.1",
            "--n-samples-per-prompt 8",
            "at least 0.25",
        ),
        case({"min_group_fraction": 1e308}, "--min-group-fraction: expected more than 0 and at most 1, found 1e+308"),
        case({"min_group_fraction": -1e308}, "--min-group-fraction: expected more than 0 and at most 1, found -1e+308"),
        case({"n_samples_per_prompt": 1, "advantage_estimator": "rloo"}, "--advantage-estimator rloo"),
        case({"n_samples_per_prompt": 1, "advantage_estimator": "opob"}, "--advantage-estimator opob: a group of one"),
        case(
            {"advantage_estimator": "opob", "token_advantages": "kl_in_reward", "kl_coef": 0.1},
            "--advantage-estimator opob with --token-advantages kl_in_reward",
        ),
        case(
            {"advantage_estimator": "opob", "normalize_advantages": True},
            "--advantage-estimator opob with --normalize-advantages",
        ),
        case(
            {"global_batch_size": 100},
            "--rollout-batch-size 32 × --n-samples-per-prompt 8 = 256",
            "--global-batch-size 100",
        ),
        case(
            {"global_batch_size": 2, "actor_num_gpus_per_node": 4},
            "2 samples per optimizer step",
            "4 data-parallel ranks",
            "--global-batch-size",
        ),
        case(
            {"actor_num_gpus_per_node": 3, "tensor_model_parallel_size": 2},
            "3 trainer ranks",
            "--tensor-model-parallel-size 2",
        ),
        case(
            {"tensor_model_parallel_size": 3, "actor_num_gpus_per_node": 3},
            "--tensor-model-parallel-size 3 does not divide",
            "num_attention_heads 4",
        ),
        case(
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "--rollout-num-gpus 3",
            "--rollout-num-gpus-per-engine 2",
        ),
        case({"max_weight_staleness": -1}, "--max-weight-staleness: expected at least 0, or none, found -1"),
        case({"max_rollout_lead": 4}, "--max-rollout-lead 4", "--max-weight-staleness 2 + 1", "lower the lead to 3"),
        case(
            {"on_policy": True, "max_weight_staleness": None, "update_weights_interval": 2},
            "--on-policy",
            "--update-weights-interval 2",
        ),
        case(
            {"debug_publication_lag": 3},
            "--debug-publication-lag 3",
            "--max-weight-staleness 2",
            "nothing could ever be trained",
        ),
        case(
            {"debug_publication_lag": 1, "stale_group_action": "wait"},
            "--debug-publication-lag 1 with --stale-group-action wait",
            "use recycle or drop, or no lag",
        ),
        case(
            {"batch_order": "reward_variance", "max_weight_staleness": None, "max_rollout_lead": 4},
            "--batch-order reward_variance without a bound",
            "--max-weight-staleness",
        ),
        case(
            {"batch_order": "reward_variance", "max_rollout_lead": 3},
            "has nothing to choose from with a lead of 3 batches",
            "--max-rollout-lead of at least 4",
            "--max-weight-staleness of 3 or more",
        ),
        case(
            SINGLE | {"batch_order": "reward_variance", "max_weight_staleness": 3},
            "--batch-order reward_variance with --n-samples-per-prompt 1",
        ),
        case(
            {"use_rollout_logprobs": False},
            "asynchronous training (--max-rollout-lead 3)",
            "--use-rollout-logprobs",
            "--use-tis",
            "--allow-uncorrected-off-policy",
        ),
        case(
            {"max_weight_staleness": None, "max_rollout_lead": 1, "debug_publication_lag": 2}
            | {"use_rollout_logprobs": False},
            "--debug-publication-lag 2",
        ),
        case(
            {"advantage_estimator": "token_rewards"},
            "--advantage-estimator token_rewards",
            "add --token-advantages gae",
        ),
        case({"use_tis": True}, "--use-tis with --use-rollout-logprobs corrects twice"),
        case(
            {"policy_loss": "sapo", "eps_clip_high": 0.28}, "--eps-clip-high 0.28 has no effect with --policy-loss sapo"
        ),
        case({"policy_loss": "cispo", "eps_clip_c": 4.0}, "--eps-clip-c 4.0 has no effect"),
        case({"kl_cov_ratio": 0.5}, "--kl-cov-ratio 0.5 has no effect with --policy-loss"),
        case({"policy_loss": "kl_cov", "eps_clip": 0.1}, "--eps-clip 0.1 has no effect with --policy-loss kl_cov"),
        case({"policy_loss": "clip_cov", "clip_cov_lb": 5.0}, "--clip-cov-lb 5.0 is not less than --clip-cov-ub 5.0"),
        case(
            DECOUPLED | {"prox_logp_method": "snapshots", "max_weight_staleness": None},
            "--prox-logp-method snapshots keeps the weights of --max-weight-staleness versions",
        ),
        case(
            DECOUPLED | {"policy_loss": "sat"},
            "--policy-loss sat compares with the policy that sampled",
            "add --use-rollout-logprobs, and leave --use-tis out",
        ),
        case({"sat_quantile": 0.5}, "--sat-quantile 0.5 has no effect with --policy-loss ppo_clip"),
        case({"policy_loss": "dis", "eps_clip_c": 4.0}, "--eps-clip-c 4.0 has no effect"),
        case(
            DECOUPLED | {"policy_loss": "clip_cov", "prox_logp_method": "loglinear"},
            "--policy-loss clip_cov chooses tokens before the first optimizer step",
        ),
        case({"tau_neg": 2.0}, "--tau-neg 2.0 has no effect with --policy-loss ppo_clip"),
        case(
            {"loss_aggregation": "sequence_sum"},
            "--loss-aggregation sequence_sum divides by --loss-length-normalizer: give it, such as",
        ),
        case({"kl_target": 0.1}, "--kl-target 0.1 has no effect without --use-kl-loss or"),
        case({"kl_target": 0.1, "use_kl_loss": True}, "--kl-target 0.1 multiplies --kl-loss-coef, which is 0"),
        case(
            KL_LOSS | {"kl_target": 0.1, "token_advantages": "kl_in_reward", "kl_coef": 0.1},
            "--kl-target 0.1 adapts one coefficient",
        ),
        case(
            KL_LOSS | {"kl_target": 0.1, "kl_horizon": 12, "rollout_batch_size": 8, "n_samples_per_prompt": 8},
            "--kl-horizon 12: expected more than a fifth of the 64 sequences of a rollout step; a KL below --kl-target",
        ),
        case({"ref_update_interval": 5}, "--ref-update-interval 5 has no effect"),
        case(KL_LOSS | {"ref_update_interval": 5, "lora_rank": 4}, "--ref-update-interval 5 with --lora-rank"),
        case({"entropy_coef_end": 0.0}, "--entropy-coef-end 0.0 is --entropy-coef"),
        case({"token_advantages": "kl_in_reward"}, "--token-advantages kl_in_reward with --kl-coef 0"),
        case(
            PPO | {"lambd": 0.95, "lambd_length_alpha": 1.5},
            "--lambd 0.95 with --lambd-length-alpha 1.5, which takes its place",
        ),
        case(
            PPO | {"num_critic_only_steps": 5, "num_rollout": 5},
            "--num-critic-only-steps 5 leaves none of --num-rollout 5 for the policy",
        ),
        case({"token_advantages": "gae", "advantage_estimator": "grpo"}, "use --advantage-estimator reinforce"),
        case(PPO | {"lora_rank": 4}, "--lora-rank 4 with --token-advantages gae: a critic is"),
        case({"kl_reward_type": "k3"}, "--kl-reward-type k3 has no effect without"),
        case({"overlong_buffer_len": 10**6}, "--overlong-buffer-len 1000000 is more than --rollout-max-response-len"),
        case({"m2_threshold": 0.04}, "--m2-threshold compares the trainer's log-probs"),
        case({"use_rs": True}, "--use-rs rejects nothing: give --rs-lower-bound"),
        case(
            {"use_rs": True, "rs_veto_threshold": 0.1, "rs_statistic": "k1"},
            "--rs-statistic k1 has no effect without --rs-lower-bound or --rs-upper-bound",
        ),
        case(
            {"use_rs": True, "rs_lower_bound": 2.0, "rs_upper_bound": 1.0},
            "--rs-lower-bound 2.0 is more than --rs-upper-bound 1.0",
        ),
        case(DECOUPLED | {"tis_clip_low": 3.0}, "--tis-clip-low 3.0 is more than --tis-clip 2.0"),
        case({"prox_logp_method": "loglinear"}, "--prox-logp-method loglinear with --use-rollout-logprobs"),
        case(
            {"prox_logp_method": "loglinear", "use_rollout_logprobs": False, "allow_uncorrected_off_policy": True},
            "--prox-logp-method loglinear needs the weight of decoupled PPO: add --use-tis",
        ),
        case({"kl_loss_type": "mine:k4"}, "--kl-loss-type mine:k4 has no effect without --use-kl-loss"),
        case(
            {"policy_loss": "grpo"},
            "--policy-loss: expected one of ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, clip_cov, kl_cov",
        ),
        case({"stall_timeout": 400.0}, "--stall-timeout 400 is shorter than --request-timeout 600"),
        case(
            {"verify_weights": "canary", "verify_weights_skip": ("lm_head",)},
            "--verify-weights-skip has no effect with --verify-weights canary",
        ),
        case({"max_run_restarts": 1, "save": Path("checkpoints")}, "--max-run-restarts without --save-interval"),
        case(
            {"save": Path("checkpoints"), "save_interval": 20, "save_retain_interval": 30},
            "--save-retain-interval 30",
            "--save-interval 20 does not write them",
            "a multiple",
        ),
        case({"load": Path("absent")}, "--load absent", "no such directory"),
        case(
            {"prompt_sampler": "difficulty", "pass_rates": ("absent",)},
            "--pass-rates absent: there is no such directory",
        ),
        case({"prompt_sampler": "difficulty", "pass_rates": (".",), "run_dir": Path()}, "--pass-rates . is --run-dir"),
        case({"rm_type": "maths"}, "--rm-type: expected one of exact_match", "did you mean math?"),
        case({"rm_type": None}, "no reward", "--rm-type", "--custom-rm-path"),
        case(
            {"environment_path": "a:b", "agent_command": "python agent.py"},
            "--environment-path and --agent-command each make trajectories",
        ),
        case({"agent_path": "a:b", "apply_chat_template": False}, "--agent-path needs the chat template"),
        case({"agent_command": " "}, "--agent-command is empty"),
        case(
            {"agent_command": "python 'agent.py"},
            "--agent-command python 'agent.py: expected a command as a shell splits it: No closing quotation",
        ),
        case({"mcp_server": ("",)}, "--mcp-server is empty"),
        case({"mcp_server": ("a 'b",)}, "--mcp-server a 'b: expected a command as a shell"),
        case({"mcp_server": ("a", "a")}, "--mcp-server a is given twice"),
        case({"mcp_server": ("a",), "agent_path": "a:b"}, "--mcp-server with --agent-path, which calls tools itself"),
        case({"mcp_server": ("a",), "apply_chat_template": False}, "--mcp-server needs the chat template"),
        case({"mcp_server": ("a",), "rm_type": None}, "no reward"),
        case({"mcp_server": ("a",), "environment_timeout": 5000}, "--environment-timeout 5000"),
        case({"environment": "gym:a"}, "--environment gym:a: expected KIND:NAME"),
        case(
            {"environment": "openenv:maze"},
            "--environment openenv:maze: expected the URL of its server, such as openenv:http://127.0.0.1:8000",
        ),
        case({"environment": "gymnasium:a", "environment_config": "a"}, "--environment-config a"),
        case({"environment": "verifiers:a"}, "give --environment-python"),
        case(
            {"environment": "verifiers:a", "environment_python": "python", "mcp_server": ("a",)},
            "--mcp-server with --environment verifiers:..., which calls tools itself",
        ),
        case({"environment_path": "a.b"}, "--environment-path a.b: expected module:attr"),
        case(
            {"tool_call_parser": "quen"},
            "--tool-call-parser quen: expected one of auto, apertus2509",
            "did you mean qwen?",
        ),
        case({"reasoning_parser": "quen3"}, "--reasoning-parser quen3: expected one of auto", "did you mean qwen3?"),
        case({"agent_path": "a:b", "agent_timeout": 5000}, "--agent-timeout 5000"),
        case({"rm_type": "remote_rm", "rm_url": "a:80"}, "--rm-url a:80: expected a URL"),
        case({"custom_rm_path": "a:b"}, "--rm-type exact_match and --custom-rm-path a:b"),
        case({"rm_type": None, "custom_rm_path": "a.b"}, "--custom-rm-path a.b: expected module:attr"),
        case({"group_rm_path": "a.b"}, "--group-rm-path a.b: expected module:attr"),
        case({"label_key": None}, "--rm-type exact_match", "--label-key none"),
        case({"rm_type": "math+format:0.1", "label_key": None}, "--rm-type math compares with a label"),
        case({"rm_type": "remote_rm"}, "--rm-type remote_rm", "give --rm-url"),
        case({"rm_type": "judge", "judge_url": "http://h/v1"}, "--judge-template"),
        case({"rm_type": "judge", "judge_url": "http://h/v1"}, "--judge-scale"),
        case({"judge_scale": "10"}, "--judge-scale: expected the lowest and the highest"),
        case({"rm_type": "reasoning_gym"}, "--rm-type reasoning_gym", "--metadata-key"),
        case({"rm_type": "code", "label_key": None}, "--rm-type code", "--metadata-key"),
        case({"rm_format": "("}, "--rm-format (: expected a regular expression"),
        case({"group_filter": ("zero_std",)}, "--group-filter: expected one of zero_variance"),
        case(
            SINGLE | {"group_filter": ("zero_variance",)},
            "--group-filter zero_variance: with --n-samples-per-prompt 1",
        ),
        case({"group_filter": ("max_length:0",)}, "--group-filter max_length:0"),
        case(
            {"group_filter": ("max_length:1024",)},
            "--group-filter max_length:1024",
            "less than --rollout-max-response-len 1024",
        ),
        case({"group_filter": ("truncated:1",)}, "--group-filter truncated:1: expected a fraction"),
        case({"num_steps_per_rollout": 3}, "= 256 samples do not divide into --num-steps-per-rollout 3"),
        case(
            {"num_steps_per_rollout": 4, "global_batch_size": 128},
            "--num-steps-per-rollout 4 of 256 samples are 64 per step, --global-batch-size is 128: give one of them",
        ),
        case(
            {"lora_rank": 8, "target_modules": ("linear_qkv,lm_head",)},
            "--target-modules: expected all-linear or some of linear_qkv, ",
            "found lm_head",
        ),
        case({"lora_rank": 8, "target_modules": ("qproj",)}, "found qproj; did you mean q_proj?"),
        case(
            {"recompute_granularity": "selective", "recompute_modules": ("cor_attn",)},
            "found cor_attn; did you mean core_attn?",
        ),
        case(
            {"lora_rank": 8, "target_modules": ("q_proj", "v_proj")},
            "--target-modules q_proj v_proj without k_proj: Megatron computes them as one layer, linear_qkv",
        ),
        case({"lora_rank": 8, "target_modules": ()}, "--target-modules is empty"),
        case(
            {"lora_rank": 3, "tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "--lora-rank 3 is not a multiple of --tensor-model-parallel-size 2",
        ),
        case(
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")},
            "--recompute-modules: expected some of core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up",
            "found norm",
        ),
        case(
            {"share_prefixes": True, "device": "cuda"},
            "--share-prefixes with --device cuda: attention on GPUs takes whole samples",
        ),
        case(
            CONTEXT_PARALLEL | {"share_prefixes": True, "device": "cpu"},
            "--share-prefixes with --context-parallel-size 2, which splits every sample",
        ),
        case(
            {"enable_mtp_training": True, "lora_rank": 8}, "--enable-mtp-training with --lora-rank 8 is not implemented"
        ),
        case(
            {"enable_mtp_training": True, "share_prefixes": True, "device": "cpu"},
            "--enable-mtp-training with --share-prefixes is not implemented",
        ),
        case(
            CONTEXT_PARALLEL | {"enable_mtp_training": True},
            "--enable-mtp-training with --context-parallel-size 2 is not implemented",
        ),
        case({"min_lr": 1.0}, "--min-lr 1.0 is larger than --lr"),
        case({"lr_decay_style": "cubic"}, "--lr-decay-style: expected one of constant, linear, cosine"),
        case(
            {"agent_command": "agent", "max_tokens_per_gpu": 1000},
            "--max-tokens-per-gpu 1000",
            "--rollout-max-response-len 1024",
            "at least 1025",
        ),
        case(
            {"agent_command": "agent", "max_tokens_per_gpu": 1100, "rollout_max_prompt_len": 128},
            "--rollout-max-prompt-len 128 + --rollout-max-response-len 1024",
            "at least 1152",
        ),
        case(
            CONTEXT_PARALLEL | {"agent_command": "agent", "max_tokens_per_gpu": 500},
            "--max-tokens-per-gpu 500 on each of 2 context-parallel ranks",
            "at least 513",
        ),
        case({"context_parallel_size": 2}, "× --context-parallel-size 2): change one"),
        case({"rollout_max_response_len": 4096, "max_tokens_per_gpu": 8192}, "max_position_embeddings 2048"),
        case({"rollout_top_p": 1.5}, "--rollout-top-p 1.5: SGLang"),
        case({"rollout_top_k": 0}, "--rollout-top-k 0: SGLang"),
        case({"eval_top_k": 0}, "--eval-top-k: expected -1 (all tokens) or at least 1"),
        case({"rollout_temperature": 1e-7}, "--rollout-temperature: expected at least 1e-06"),
        case(
            {"rollout_top_p": 0.9, "rollout_top_k": 50},
            "--rollout-top-p 0.9 and --rollout-top-k 50: SGLang",
            "log-probs as they were before it was cut",
            "--eval-top-p",
        ),
        case({"rollout_top_k": 50}, "--rollout-top-k 50: SGLang"),
        case({"eps_clip_c": 1.0}, "--eps-clip-c: expected more than 1, or none"),
        case({"rollout_batch_size": 10**12}, "expected at least 1 and at most 1000000, found 10000"),
        case({"lr": 1e9}, "--lr: expected more than 0 and at most 1, found 1000000000.0"),
        case({"rollout_stop": ("END", "")}, "--rollout-stop: expected texts that are not empty"),
        case({"eps_clip": 5.0}, "--eps-clip 5 without --eps-clip-high clips ratios to -4 ... 6"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_flags_to_change(
    valid: dict[str, object], change: dict[str, object], messages: tuple[str, ...]
):
    """# covers: C3, C4, C12, O4"""
    found = refusal_of(valid | change)
    for message in messages:
        assert message in found
    assert "problems" not in found, "one mistake gives one message"


def test_log_probs_are_not_compared_with_engines_of_another_run(valid: dict[str, object], tmp_path: Path):
    """# covers: C12"""
    (tmp_path / "0.parquet").touch()
    found = refusal_of(valid | {"max_logprob_diff": 0.1, "load_debug_rollout_data": tmp_path / "0.parquet"})
    assert "--max-logprob-diff 0.1 compares the trainer with the engines that served its weights" in found


def test_all_problems_are_reported_together(valid: dict[str, object]):
    found = refusal_of(valid | {"hf_checkpoint": None, "rollout_batch_size": 0, "save_interval": 3, "use_tis": True})
    assert "4 problems" in found
    for flag in ("--hf-checkpoint", "--rollout-batch-size", "--save-interval", "--use-tis"):
        assert flag in found


@pytest.mark.parametrize(
    "change",
    [
        {"on_policy": True, "use_rollout_logprobs": False},
        {"eval_prompt_data": EVALUATED, "eval_top_p": 0.95, "eval_top_k": 50, "eval_temperature": 0.6},
        {"eps_clip_c": None},
        {"on_policy": True, "max_rollout_lead": 2},  # flags of an asynchronous run with --on-policy after them
        {"max_weight_staleness": 0, "use_rollout_logprobs": False},
        {"use_rollout_logprobs": False, "allow_uncorrected_off_policy": True},
        DECOUPLED,
        SINGLE,
        {"n_samples_per_prompt": 8, "min_group_fraction": 0.25},
        {"max_weight_staleness": None, "max_rollout_lead": 16},
        {"max_weight_staleness": 8, "max_rollout_lead": 1, "debug_publication_lag": 8},
        {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
        {"use_kl_loss": True},
        {"eval_prompt_data": EVALUATED, "n_samples_per_eval_prompt": 4},
        {"num_steps_per_rollout": 4},
        {"num_steps_per_rollout": 4, "global_batch_size": 64},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"lora_rank": 8, "lora_type": "dora", "target_modules": ("q_proj,k_proj,v_proj", "linear_fc2")},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
        {"share_prefixes": True, "device": "cpu"},
    ],
    ids=str,
)
def test_settings_that_can_work_pass(valid: dict[str, object], change: dict[str, object]):
    validate(assemble(valid | change, {}))


@pytest.mark.parametrize(("steps", "samples"), [(None, 256), (4, 64), (512, 1)])
def test_steps_per_rollout_share_its_samples(steps: int | None, samples: int):
    assert assemble({"num_steps_per_rollout": steps}, {}).global_batch_size == samples


def test_model_directory_without_its_files(valid: dict[str, object]):
    model: Path = valid["hf_checkpoint"]
    (model / "model.safetensors").unlink()
    assert "no weights (*.safetensors)" in refusal_of(valid)
    (model / "config.json").write_text("{")
    save_file({}, model / "model.safetensors")
    assert "config.json is not a JSON object" in refusal_of(valid)
    (model / "config.json").unlink()
    assert "has no config.json" in refusal_of(valid)
    assert "found a file" in refusal_of(valid | {"hf_checkpoint": Path(valid["prompt_data"][0])})


MIXTURE = {"n_routed_experts": 12, "moe_intermediate_size": 32}
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"


@pytest.mark.parametrize(
    ("config", "change", "messages"),
    [
        case({}, {EXPERT: 2}, "--expert-model-parallel-size", "model has none: leave them out"),
        case({}, {EXPERT_TENSOR: 2}, "--expert-tensor-parallel-size", "has none: leave them out"),
        case(MIXTURE, {EXPERT: 5}, "--expert-model-parallel-size 5 does not divide", "n_routed_experts 12"),
        case({"num_experts": 8}, {EXPERT: 3}, "does not divide the model's num_experts 8"),
        case(MIXTURE, {EXPERT_TENSOR: 3}, "--expert-tensor-parallel-size 3", "moe_intermediate_size 32"),
        case(
            MIXTURE,
            {EXPERT: 4, EXPERT_TENSOR: 2, "actor_num_gpus_per_node": 4},
            "4 trainer ranks do not divide into sets of experts on 8 ranks",
            "--expert-tensor-parallel-size 2 × --expert-model-parallel-size 4 × --pipeline-model-parallel-size 1",
        ),
        case(
            MIXTURE,
            {"advantage_estimator": "opob", EXPERT: 2, "actor_num_gpus_per_node": 2},
            "--advantage-estimator opob with --expert-model-parallel-size 2",
        ),
        case(
            MIXTURE,
            {"advantage_estimator": "opob", EXPERT_TENSOR: 2, "actor_num_gpus_per_node": 2},
            "--advantage-estimator opob with --expert-tensor-parallel-size 2",
            "use 1, which is --tensor-model-parallel-size",
        ),
        case(MIXTURE, {EXPERT: 0}, "--expert-model-parallel-size: expected at least 1, found 0"),
    ],
)
def test_experts_that_cannot_be_split(
    valid: dict[str, object], config: dict[str, object], change: dict[str, object], messages: tuple[str, ...]
):
    describe_model(valid, config)
    found = refusal_of(valid | change)
    for message in messages:
        assert message in found


@pytest.mark.parametrize("change", [{}, {EXPERT: 4}, {EXPERT: 2, EXPERT_TENSOR: 2}, {EXPERT_TENSOR: 4}], ids=str)
def test_experts_that_can_be_split(valid: dict[str, object], change: dict[str, object]):
    describe_model(valid, MIXTURE)
    validate(assemble(valid | {"actor_num_gpus_per_node": 4} | change, {}))


def test_matrices_of_no_experts_are_no_matter(valid: dict[str, object]):
    describe_model(valid, {"num_attention_heads": 4})
    split = {"tensor_model_parallel_size": 2, EXPERT_TENSOR: 1, "actor_num_gpus_per_node": 2}
    validate(assemble(valid | split | {"advantage_estimator": "opob"}, {}))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, {"use_rollout_routing_replay": True}, "--use-rollout-routing-replay: --hf-checkpoint .* is a dense model"),
        ({}, {"use_routing_replay": True}, "--use-routing-replay: --hf-checkpoint .* is a dense model"),
        (MIXTURE, {"use_rollout_routing_replay": True}, "num_experts_per_tok, found 2 and None"),
        (MIXTURE, {"use_routing_replay": True}, "--use-routing-replay with --use-rollout-logprobs has no effect"),
    ],
)
def test_routing_that_cannot_be_replayed(
    valid: dict[str, object], config: dict[str, object], change: dict[str, object], message: str
):
    # covers: M19
    describe_model(valid, config)
    assert re.search(message, refusal_of(valid | change))


def test_routers_that_nobody_asks_cannot_be_replayed(valid: dict[str, object]):
    # covers: M19
    describe_model(valid, MIXTURE | {"num_experts_per_tok": 2})
    arguments = assemble(valid | {"use_rollout_routing_replay": True}, {})
    model = dataclasses.replace(arguments.model, megatron_extra=("--moe-router-fusion",))
    with pytest.raises(ConfigurationError, match="--megatron-moe-router-fusion passes over what --use-rollout-routing"):
        validate(dataclasses.replace(arguments, model=model))


def test_routing_that_can_be_replayed(valid: dict[str, object]):
    # covers: M19
    describe_model(valid, MIXTURE | {"num_experts_per_tok": 2})
    validate(assemble(valid | {"use_rollout_routing_replay": True}, {}))
    validate(assemble(valid | DECOUPLED | {"use_routing_replay": True}, {}))


def describe_model(values: dict[str, object], more: dict[str, object]) -> None:
    path: Path = values["hf_checkpoint"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({}, True),
        (KL_LOSS, False),
        ({"token_advantages": "kl_in_reward", "kl_coef": 0.1}, False),
        (PPO, True),
        (PPO | {"kl_coef": 0.1}, False),
        ({"policy_loss": "mine:Loss"}, False),
    ],
)
def test_a_reference_model_is_there_for_something(valid: dict[str, object], flags: dict[str, object], refused: bool):
    arguments = assemble(valid | flags | {"ref_hf_checkpoint": valid["hf_checkpoint"]}, {})
    with pytest.raises(ConfigurationError, match="--ref-hf-checkpoint has no") if refused else nullcontext():
        validate(arguments)


def test_run_directory_that_is_a_file(valid: dict[str, object]):
    assert "expected a directory, found a file" in refusal_of(valid | {"run_dir": Path(valid["prompt_data"][0])})


def test_router_port_that_is_taken(valid: dict[str, object]):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"--sglang-router-port {port} cannot be used" in refusal_of(valid | {"sglang_router_port": port})
    validate(assemble(valid | {"sglang_router_port": port}, {}))


@pytest.mark.parametrize(
    "flags",
    [
        {"eps_clip": 1.0},
        {"eps_clip": 1e9},
        {"eps_clip": 5.0, "eps_clip_high": 0.28},
        {"eps_clip": 1.5, "policy_loss": "gmpo"},  # of the log-ratio
        {"rollout_stop": ("END", " ")},
        {"lr": 1.0},
    ],
    ids=str,
)
def test_unusual_numbers_that_have_a_meaning_pass(valid: dict[str, object], flags: dict[str, object]):
    validate(assemble(valid | flags, {}))


def test_every_number_has_a_range():
    any_number = {"rs_lower_bound", "rs_upper_bound", "solved_reward"}
    one_by_one = {"rollout_top_p", "rollout_top_k", "eval_top_k"}
    numbers = {name: flag for name, flag in flag_specifications().items() if flag.kind in (int, float)}
    unbounded = {name for name, flag in numbers.items() if set(flag.bounds.values()) == {None}}
    assert unbounded == any_number | one_by_one


@pytest.mark.parametrize("flag", BOUNDED, ids=lambda flag: flag.name)
def test_a_number_out_of_its_range_is_refused_with_the_range(flag: FlagSpecification):
    beyond = {"at least": -1, "more than": 0, "at most": 1, "less than": 0}  # what to add to the bound
    for words, bound in flag.bounds.items():
        if bound is not None:
            (problem,) = range_problems(assemble({flag.name: bound + beyond[words]}, {}))
            assert problem.startswith(f"{flag.flag}: expected ")
            assert f"{words} {bound}" in problem


class TestResolvedValues:
    """What flags mean when they are left out is said in one place each."""

    @pytest.mark.parametrize(
        ("values", "bound", "lead"),
        [
            ({}, None, 3),
            ({"max_weight_staleness": 0}, 0, 1),
            ({"max_weight_staleness": 2}, 2, 3),
            ({"max_weight_staleness": 2, "max_rollout_lead": 1}, 2, 1),
            ({"max_rollout_lead": 7}, None, 7),
            ({"on_policy": True}, 0, 1),
            ({"on_policy": True, "max_weight_staleness": 2, "max_rollout_lead": 2}, 0, 1),
        ],
    )
    def test_bound_and_lead(self, values: dict[str, object], bound: int | None, lead: int):
        """# covers: C4, P2, P3"""
        staleness = assemble(values, {}).staleness
        assert (staleness.bound, staleness.lead) == (bound, lead)

    def test_sizes(self):
        arguments = Arguments()
        assert arguments.rollout.samples_per_rollout == arguments.global_batch_size == 256
        split = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2}
        assert assemble(split, {}).data_parallel_size == 4


def test_resuming_from_inside_the_run_directory_is_refused(valid: dict[str, object], tmp_path: Path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    message = refusal_of({**valid, "run_dir": tmp_path / "run", "load": checkpoints})
    assert f"--load {checkpoints} is inside --run-dir" in message


def test_environments_and_agents_may_bring_the_reward(valid: dict[str, object]) -> None:
    # covers: A4
    for origin in ("environment_path", "agent_path"):
        validate(assemble({**valid, "rm_type": None, origin: "a:b"}, {}))
