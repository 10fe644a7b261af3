"""The numbers and choices each flag accepts by itself. ``validation.py`` has what flags mean together."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.specification import FlagSpecification, flag_specifications

AT_LEAST: dict[str, int] = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_num_nodes_per_engine": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 1,
    "num_layers_per_virtual_pipeline_stage": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "recompute_num_layers": 1,
    "lora_rank": 0,
    "seed": 0,
    "rollout_seed": 0,
    "rollout_max_prompt_len": 1,
    "num_rollout": 1,
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 1,
    "extra_samples_per_prompt": 0,
    "rollout_max_response_len": 1,
    "rollout_concurrency_per_engine": 1,
    "rm_workers": 1,
    "rm_code_memory": 256,
    "max_turns": 1,
    "session_server_workers": 1,
    "max_tokens_per_turn": 1,
    "max_sample_failures": 0,
    "max_prompt_attempts": 1,
    "max_quarantined_prompts": 0,
    "max_weight_staleness": 0,
    "max_rollout_lead": 1,
    "loss_length_normalizer": 1,
    "overlong_buffer_len": 1,
    "gamma": 0,
    "lambd": 0,
    "critic_lambd": 0,
    "kl_coef": 0,
    "opd_kl_coef": 0,
    "ppo_kl_coef": 0,
    "clip_cov_lb": 0,
    "tis_clip_low": 0,
    "opsm_delta": 0,
    "max_token_age": 0,
    "kl_loss_coef": 0,
    "kl_horizon": 1,
    "ref_update_interval": 1,
    "entropy_coef": 0,
    "entropy_coef_end": 0,
    "critic_lr_warmup_iters": 0,
    "critic_updates_per_step": 1,
    "num_critic_only_steps": 0,
    "global_batch_size": 1,
    "num_steps_per_rollout": 1,
    "ppo_epochs": 1,
    "max_tokens_per_gpu": 1,
    "logprob_chunk": 1,
    "min_lr": 0,
    "lr_warmup_iters": 0,
    "weight_decay": 0,
    "clip_grad": 0,
    "max_bad_steps": 1,
    "update_weights_interval": 1,
    "update_weight_buffer_size": 1,
    "rolling_engines": 1,
    "verify_weights_shares": 1,
    "canary_length": 2,
    "debug_publication_lag": 0,
    "engine_max_restarts": 0,
    "request_retries": 0,
    "sglang_router_port": 1,
    "save_interval": 1,
    "save_keep_last": 1,
    "max_run_restarts": 0,
    "save_retain_interval": 1,
    "eval_interval": 1,
    "n_samples_per_eval_prompt": 1,
    "eval_temperature": 0,
    "eval_max_response_len": 1,
    "eval_concurrency": 1,
}

ABOVE_ZERO = {
    "gpu_memory_gb",
    "lora_alpha",
    "rollout_temperature",  # the trainer divides logits by it, and equal samples teach nothing
    "eval_top_p",
    "rollout_kv_use_target",
    "engine_restart_window",
    "min_group_fraction",
    "environment_timeout",
    "agent_timeout",
    "session_timeout",
    "reward_timeout",
    "service_outage_timeout",
    "rm_code_timeout",
    "eps_clip",
    "eps_clip_high",
    "clip_cov_ratio",
    "clip_cov_ub",
    "kl_cov_ratio",
    "sat_quantile",
    "lambd_length_alpha",
    "tau_pos",
    "tau_neg",
    "tis_clip",
    "overlong_penalty_factor",
    "m2_threshold",
    "rs_veto_threshold",
    "token_age_decay",
    "kl_target",
    "ref_update_alpha",
    "critic_lr",
    "value_clip",
    "mtp_loss_scaling_factor",
    "lr",
    "adam_eps",
    "ess_lr_full_share",
    "grad_norm_limit",
    "max_logprob_diff",
    "canary_tolerance",
    "publication_timeout",
    "distributed_timeout_minutes",
    "engine_start_timeout",
    "request_timeout",
    "stall_timeout",
}

AT_MOST: dict[str, int] = {
    "rollout_batch_size": 1_000_000,  # what is more is mistyped
    "n_samples_per_prompt": 100_000,
    "extra_samples_per_prompt": 100_000,
    "lr": 1,  # Adam moves every weight by about as much per step
    "critic_lr": 1,
    "ess_lr_full_share": 1,
    "gamma": 1,
    "lambd": 1,
    "critic_lambd": 1,
    "token_age_decay": 1,
    "ref_update_alpha": 1,
    "clip_cov_ratio": 1,
    "kl_cov_ratio": 1,
    "sat_quantile": 1,
    "min_group_fraction": 1,
    "rollout_kv_use_target": 1,
    "eval_top_p": 1,
    "sglang_router_port": 65535,
}

IN_HALF_OPEN_UNIT_INTERVAL = {"adam_beta1", "adam_beta2"}  # [0, 1)

GREEDY_BELOW = 1e-6  # SGLang (0.5) samples greedily below this temperature, and reports log-probs at temperature 1


def range_problems(arguments: Arguments) -> Iterator[str]:
    """Yield one line per flag whose value cannot work with any other flags."""
    for name, specification in flag_specifications().items():
        value = getattr(getattr(arguments, specification.group), name)
        expected = None if value is None else _expectation(specification, value)
        if expected:
            yield f"{specification.flag}: expected {expected}, found {value}"


def _expectation(specification: FlagSpecification, value: FlagValue) -> str | None:
    """Return what was expected instead of ``value``, or None if it is allowed."""
    name = specification.name
    if specification.choices and not specification.is_choice(value):
        return f"one of {', '.join(specification.accepted)}"
    if name == "rollout_stop" and isinstance(value, tuple) and "" in value:  # every response has it
        return "texts that are not empty"
    if not isinstance(value, int | float):
        return None
    if name in AT_LEAST and not value >= AT_LEAST[name]:
        return f"at least {AT_LEAST[name]}"
    if name in ABOVE_ZERO and not value > 0:
        return "more than 0"
    if name == "eps_clip_c" and not value > 1:  # at ratio 1 the policy is still the one that sampled
        return "more than 1, or none"
    if name == "rollout_temperature" and value < GREEDY_BELOW:
        return f"at least {GREEDY_BELOW:g}, below which engines are greedy"
    if name in AT_MOST and not value <= AT_MOST[name]:
        return f"at most {AT_MOST[name]}"
    if name in IN_HALF_OPEN_UNIT_INTERVAL and not 0 <= value < 1:
        return "at least 0 and less than 1"
    if name == "eval_top_k" and not (value == -1 or value >= 1):
        return "-1 (all tokens) or at least 1"
    return None
