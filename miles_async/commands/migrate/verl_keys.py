"""Keys of verl's configuration (0.8), written on its command line as ``key=value``: what becomes of each here.

``verl.py`` applies the table; ``miles-async migrate --table verl`` prints it. Keys whose meaning depends on others
(batches, GPUs, the KL in the reward) are worked out there and have the verdict works here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from miles_async.arguments.algorithm_checks import LOSSES_WITH

VerlVerdict = Literal["works", "noted", "refused"]


@dataclass(frozen=True, slots=True)
class When:
    """The values of another key with which a key counts; None among them: that key is left out."""

    key: str
    values: tuple[str | None, ...]

    def holds(self, given: Mapping[str, str]) -> bool:
        return given.get(self.key) in self.values

    def __str__(self) -> str:
        return f"{self.key}={' or '.join(filter(None, self.values))}"


@dataclass(frozen=True, slots=True)
class VerlKey:
    """One key, or with ``.*`` at its end all keys below."""

    key: str
    verdict: VerlVerdict
    note: str  # works: what it sets; noted: why it changes nothing; refused: what to do
    _: KW_ONLY
    flag: str | None = None  # works: takes the value
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # works: value → our words; others are refused
    only: tuple[str, ...] = ()  # noted: values that change nothing; others are refused
    when: When | None = None  # works: otherwise it changes nothing


def _is(key: str, flag: str, when: When | None = None, **unset: str) -> VerlKey:
    """A key that is a flag of ours; ``unset``: a value that means "not at all"."""
    note = f"is `{flag}`, with {when}" if when else f"is `{flag}`"
    return VerlKey(key, "works", note, flag=flag, values={value: () for value in unset.values()}, when=when)


def _switch(key: str, *on: str, off: tuple[str, ...] = (), note: str = "") -> VerlKey:
    meanings = [f"{value} is `{' '.join(words)}`" for value, words in (("True", on), ("False", off)) if words]
    return VerlKey(key, "works", note or ", ".join(meanings), values={"True": on, "False": off})


def _choice(key: str, note: str, **values: str) -> VerlKey:
    named = {name.removesuffix("_").replace("__", "-"): tuple(words.split()) for name, words in values.items()}
    return VerlKey(key, "works", note, values=named)


def _together(key: str, note: str) -> VerlKey:
    """A key that is worked out with others."""
    return VerlKey(key, "works", note)


def _noted(key: str, note: str, *only: str) -> VerlKey:
    return VerlKey(key, "noted", note, only=only)


def _refused(key: str, note: str) -> VerlKey:
    return VerlKey(key, "refused", note)


_PACKED = "samples are packed: --max-tokens-per-gpu is the size of a micro-batch"
_SGLANG = "SGLang generates, with CUDA graphs, its own chunks and caches: --sglang-X reaches it"
_MEMORY = "Megatron trains here, and keeps weights where they are: --recompute-granularity and --optimizer-cpu-offload"
_REFERENCE = "the reference has the trainer's layout, and is packed like its batches"
_LONG = "prompts that are too long are skipped, and counted"
_TOOLS = "tools are an environment of yours, --environment-path module:attr; docs/agents.md has an example"
_JUDGE = "a reward model is a service: --rm-type remote_rm --rm-url URL, or --rm-type judge --judge-url URL"
_CRITIC = "with adv_estimator gae the trainer's ranks have a critic, of the policy's layout, batches and weight decay"
_HOOK = "a reward is called with (prompt, sample): --custom-rm-path module:attr"
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_ESTIMATOR, _LOSS_MODE = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_GAE = When(_ESTIMATOR, ("gae",))
_LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"} | {
    loss: loss for loss in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
}
"""loss_mode → --policy-loss."""
_OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Modes that take the mean over sequences, whatever loss_agg_mode says."""
_AGGREGATED = When(_LOSS_MODE, (None, *(mode for mode in _LOSSES if mode not in _OF_SEQUENCES)))


def _read_by_losses(name: str) -> When:
    """``name``: the field of our flag, which train refuses with a loss that does not read it."""
    modes = tuple(mode for mode, loss in _LOSSES.items() if loss in LOSSES_WITH[name])
    return When(_LOSS_MODE, (None, *modes) if "vanilla" in modes else modes)


RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.num_workers": "reward_model.num_workers",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "reward.reward_model.": "reward_model.",
}
"""Key, or its beginning, since verl 0.7 → what it was before; the table has the latter."""

KEYS: tuple[VerlKey, ...] = (
    # Prompts.
    VerlKey("data.train_files", "works", "is `--prompt-data`", flag="--prompt-data"),
    _together("data.val_files", "is `--eval-prompt-data`, with names of folders before files that share a name"),
    _is("data.prompt_key", "--input-key"),
    _is("data.max_prompt_length", "--rollout-max-prompt-len"),
    _is("data.max_response_length", "--rollout-max-response-len"),
    _is("data.train_batch_size", "--rollout-batch-size"),
    _switch("data.shuffle", "--rollout-shuffle", off=("--no-rollout-shuffle",)),
    _is("data.seed", "--rollout-seed", unset="None"),
    _noted("data.truncation", _LONG),
    _noted("data.filter_overlong_prompts", _LONG),
    _noted("data.filter_overlong_prompts_workers", _LONG),
    _noted("data.reward_fn_key", "the reward is --rm-type for all rows, or rm_type in the metadata of one"),
    *(_noted(f"data.{key}", "prompts are read when they are needed") for key in
      ("return_raw_chat", "return_full_prompt", "val_batch_size", "gen_batch_size", "dataloader_num_workers",
       "use_shm")),
    _switch("data.trust_remote_code", "--trust-remote-code"),
    _refused("data.apply_chat_template_kwargs.*", "set their defaults in chat_template.jinja of --hf-checkpoint"),
    _refused("data.custom_cls.*", "write the prompts to a file first, or name a data set of the hub: --prompt-data"),
    _refused("data.sampler.*", "a sampler orders the rows of an epoch: --prompt-sampler module:attr"),
    _together("data.image_key", """images is `--multimodal-keys '{"image": "images"}'`"""),
    _refused("data.video_key", "models that read videos are not trained"),
    _switch(f"{_ACTOR}.freeze_vision_tower", "--freeze-vision-tower", off=("--no-freeze-vision-tower",)),
    # The model.
    VerlKey(f"{_MODEL}.path", "works", "is `--hf-checkpoint`, a directory", flag="--hf-checkpoint"),
    _is(f"{_MODEL}.lora_rank", "--lora-rank"),
    _is(f"{_MODEL}.lora_alpha", "--lora-alpha"),
    _is(f"{_MODEL}.lora.rank", "--lora-rank"),
    _is(f"{_MODEL}.lora.alpha", "--lora-alpha"),
    _is(f"{_MODEL}.lora.type", "--lora-type"),
    _is(f"{_MODEL}.target_modules", "--target-modules", all="all-linear"),
    _is(f"{_MODEL}.lora.target_modules", "--target-modules", all="all-linear"),
    _is(f"{_MODEL}.lora_adapter_path", "--lora-adapter-path", unset="None"),
    _refused(f"{_MODEL}.exclude_modules", "--target-modules names the layers that get an adapter"),
    _noted(f"{_MODEL}.lora.dropout", "engines have no dropout", "0", "0.0"),
    _noted(f"{_MODEL}.lora.lora_A_init_method", "the first matrix is drawn, the second is 0"),
    _switch(f"{_MODEL}.enable_gradient_checkpointing", "--recompute-granularity", "full",
            note="True is `--recompute-granularity full`"),
    _noted(f"{_MODEL}.enable_activation_offload", _MEMORY, "False"),
    *(_noted(f"{_MODEL}.{key}", "Megatron's layers take packed samples, and log-probs come in chunks") for key in
      ("use_remove_padding", "use_fused_kernels", "fused_kernel_options.*", "use_liger", "use_shm",
       "external_lib")),
    _switch(f"{_MODEL}.trust_remote_code", "--trust-remote-code"),
    _noted(f"{_MODEL}.override_config.*", "config.json of --hf-checkpoint describes the model"),
    _noted(f"{_MODEL}.mtp.*", "--enable-mtp-training trains layers for multi-token prediction"),
    # The trainer's ranks.
    _is(f"{_MEGATRON}.tensor_model_parallel_size", "--tensor-model-parallel-size"),
    _is(f"{_MEGATRON}.pipeline_model_parallel_size", "--pipeline-model-parallel-size"),
    _is(f"{_MEGATRON}.virtual_pipeline_model_parallel_size", "--num-virtual-stages-per-pipeline-rank", unset="None"),
    _is(f"{_MEGATRON}.context_parallel_size", "--context-parallel-size"),
    _is(f"{_MEGATRON}.expert_model_parallel_size", "--expert-model-parallel-size"),
    _is(f"{_MEGATRON}.expert_tensor_parallel_size", "--expert-tensor-parallel-size", unset="None"),
    _is(f"{_ACTOR}.ulysses_sequence_parallel_size", "--context-parallel-size"),
    _is(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "--context-parallel-size"),
    _switch(f"{_MEGATRON}.sequence_parallel", off=("--no-sequence-parallel",)),
    _is(f"{_MEGATRON}.seed", "--seed"),
    *(_together(f"{_MEGATRON}.{key}.*", "is the flag `--X` of the same name, or `--megatron-X`") for key in
      ("override_transformer_config", "override_ddp_config")),
    _together(f"{_OPTIM}.override_optimizer_config.*", "is the flag `--X` of the same name, or `--megatron-X`"),
    *(_noted(f"{_MEGATRON}.{key}", _MEMORY) for key in ("param_offload", "grad_offload", "optimizer_offload")),
    *(_noted(f"{_MEGATRON}.{key}", "Megatron-Bridge reads and writes Hugging Face files") for key in
      ("use_mbridge", "vanilla_mbridge", "use_dist_checkpointing", "dist_checkpointing_path")),
    *(_noted(f"{_MEGATRON}.{key}", "it always is") for key in ("use_distributed_optimizer", "use_remove_padding")),
    _noted(f"{_MEGATRON}.dtype", "weights are read as bf16 on GPUs; what fp16 needs, a scaled loss, is not implemented",
           "bfloat16"),
    _noted(f"{_ACTOR}.fsdp_config.*", _MEMORY),
    _noted(f"{_ACTOR}.strategy", "Megatron trains"),
    _noted("model_engine", "Megatron trains"),
    _noted(f"{_ACTOR}.use_torch_compile", "Megatron's layers are used"),
    *(_noted(f"{_ACTOR}.{key}", "entropy comes in chunks, as log-probs do") for key in
      ("entropy_checkpointing", "entropy_from_logits_with_chunking")),
    _together("actor_rollout_ref.nccl_timeout", "is `--distributed-timeout-minutes`, in minutes"),
    _noted("actor_rollout_ref.hybrid_engine", "sides are apart, or take turns with --colocate"),
    _noted("actor_rollout_ref.ref.*", _REFERENCE),
    # The optimizer and its batches.
    _is(f"{_OPTIM}.lr", "--lr"),
    _is(f"{_OPTIM}.min_lr", "--min-lr"),
    _is(f"{_OPTIM}.weight_decay", "--weight-decay"),
    _is(f"{_OPTIM}.lr_warmup_steps", "--lr-warmup-iters", unset="-1", null="None"),
    _choice(f"{_OPTIM}.lr_warmup_steps_ratio", "other shares: give `--lr-warmup-iters`", **{"0": "", "0.0": ""}),
    _is(f"{_OPTIM}.lr_decay_style", "--lr-decay-style"),
    _is(f"{_OPTIM}.warmup_style", "--lr-decay-style", unset="None"),
    _is(f"{_OPTIM}.lr_scheduler_type", "--lr-decay-style"),
    _is(f"{_OPTIM}.clip_grad", "--clip-grad"),
    _is(f"{_ACTOR}.grad_clip", "--clip-grad"),
    _together(f"{_OPTIM}.betas", "are `--adam-beta1` and `--adam-beta2`"),
    _noted(f"{_OPTIM}.optimizer", "AdamW is the optimizer", "adam", "AdamW"),
    _noted(f"{_OPTIM}.total_training_steps", "the schedule ends with the run"),
    _noted(f"{_OPTIM}.lr_decay_steps", "the schedule ends with the run"),
    _together(f"{_ACTOR}.ppo_mini_batch_size", "is `--num-steps-per-rollout`: data.train_batch_size over it"),
    _is(f"{_ACTOR}.ppo_epochs", "--ppo-epochs"),
    _is(f"{_ACTOR}.ppo_max_token_len_per_gpu", "--max-tokens-per-gpu"),
    *(_noted(f"{_ACTOR}.{key}", _PACKED) for key in
      ("use_dynamic_bsz", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")),
    _noted(f"{_ACTOR}.shuffle", "samples are balanced over ranks, in an order that the seed decides"),
    _switch(f"{_ACTOR}.use_prefix_grouper", "--share-prefixes"),
    # Advantages and loss.
    _choice(
        "algorithm.adv_estimator",
        "grpo, rloo, gae, reinforce_plus_plus and reinforce_plus_plus_baseline; for others `--advantage-estimator` "
        "module:attr",
        gae="--advantage-estimator reinforce --token-advantages gae --normalize-advantages",
        grpo="--advantage-estimator grpo",
        grpo_vectorized="--advantage-estimator grpo",
        rloo="--advantage-estimator rloo",
        rloo_vectorized="--advantage-estimator rloo",
        reinforce_plus_plus="--advantage-estimator reinforce --normalize-advantages",
        reinforce_plus_plus_baseline="--advantage-estimator grpo --no-grpo-std-normalization --normalize-advantages",
    ),
    _switch("algorithm.norm_adv_by_std_in_grpo", off=("--no-grpo-std-normalization",)),
    _together("algorithm.use_kl_in_reward", "with kl_ctrl.kl_coef: `--token-advantages kl_in_reward --kl-coef X`; with "
              "adv_estimator gae `--kl-coef X` alone"),
    _together("algorithm.kl_ctrl.kl_coef", "is `--kl-coef`, with use_kl_in_reward"),
    _together("algorithm.kl_penalty", "is `--kl-reward-type`: kl is k1, mse k2, with use_kl_in_reward"),
    _noted("algorithm.kl_ctrl.type", "fixed; for adaptive give `--kl-target` and `--kl-horizon`", "fixed"),
    # Discounted rewards without a critic are not implemented, which train says.
    _is("algorithm.gamma", "--gamma", When(_ESTIMATOR, ("gae", "reinforce_plus_plus"))),
    _is("algorithm.lam", "--lambd", _GAE),
    _noted("algorithm.use_pf_ppo", "it is not implemented", "False"),
    _switch("algorithm.filter_groups.enable", "--group-filter", "zero_variance",
            note="True is `--group-filter zero_variance`"),
    _noted("algorithm.filter_groups.metric", "groups whose rewards are equal are replaced"),
    _noted("algorithm.filter_groups.max_num_gen_batches", "a rejected group is replaced by one more, at once"),
    _choice("algorithm.rollout_correction.rollout_is", "is `--use-tis`", token="--use-tis --tis-level token",
            sequence="--use-tis --tis-level sequence", geometric="--use-tis --tis-level geometric", None_=""),
    _is("algorithm.rollout_correction.rollout_is_threshold", "--tis-clip"),
    _switch("algorithm.rollout_correction.bypass_mode", "--use-rollout-logprobs"),
    _refused(
        "algorithm.rollout_correction.*",
        "`--use-rs` and its flags reject tokens and sequences, which still count in the mean of the loss; in "
        "verl they do not",
    ),
    _together(f"{_ACTOR}.use_kl_loss", "is `--use-kl-loss`, with the two below"),
    _together(f"{_ACTOR}.kl_loss_coef", "is `--kl-loss-coef`, with use_kl_loss"),
    _together(f"{_ACTOR}.kl_loss_type", "is `--kl-loss-type`: kl is k1, mse k2, with use_kl_loss"),
    _is(f"{_ACTOR}.entropy_coeff", "--entropy-coef"),
    _is(f"{_ACTOR}.clip_ratio", "--eps-clip", _read_by_losses("eps_clip")),
    _is(f"{_ACTOR}.clip_ratio_low", "--eps-clip", _read_by_losses("eps_clip")),
    _is(f"{_ACTOR}.clip_ratio_high", "--eps-clip-high", _read_by_losses("eps_clip_high")),
    _is(f"{_ACTOR}.clip_ratio_c", "--eps-clip-c", _read_by_losses("eps_clip_c")),
    *(_is(f"{_ACTOR}.{place}{key}", f"--{key.replace('_', '-')}", _read_by_losses(key))
      for key in ("tau_pos", "tau_neg") for place in ("", "policy_loss.")),
    _choice(_LOSS_MODE, "vanilla is ppo_clip, geo_mean gmpo; else `--policy-loss` module:attr. The loss of gspo, sapo "
            "and geo_mean is a mean over sequences",
            **{mode: f"--policy-loss {loss}" + " --loss-aggregation sequence_mean" * (mode in _OF_SEQUENCES)
               for mode, loss in _LOSSES.items()}),
    *(_is(f"{_ACTOR}.policy_loss.{key}", f"--{key.replace('_', '-')}", _read_by_losses(key)) for key in
      ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")),
    replace(_choice(f"{_ACTOR}.loss_agg_mode", "for others `--loss-aggregation` module:attr",
                    token__mean="--loss-aggregation token_mean",
                    seq__mean__token__mean="--loss-aggregation sequence_mean",
                    seq__mean__token__sum__norm="--loss-aggregation sequence_sum"), when=_AGGREGATED),
    _is(f"{_ACTOR}.loss_scale_factor", "--loss-length-normalizer", _AGGREGATED, unset="None"),
    *(_choice(f"{place}.router_replay.mode", "R2 is `--use-routing-replay`, R3 `--use-rollout-routing-replay`",
              disabled="", R2="--use-routing-replay", R3="--use-rollout-routing-replay") for place in
      (_ACTOR, _MEGATRON)),
    # Engines.
    _is(f"{_ROLLOUT}.n", "--n-samples-per-prompt"),
    _is(f"{_ROLLOUT}.temperature", "--rollout-temperature"),
    _is(f"{_ROLLOUT}.top_p", "--rollout-top-p"),
    _is(f"{_ROLLOUT}.top_k", "--rollout-top-k"),
    _is(f"{_ROLLOUT}.val_kwargs.n", "--n-samples-per-eval-prompt"),
    _is(f"{_ROLLOUT}.val_kwargs.temperature", "--eval-temperature"),
    _is(f"{_ROLLOUT}.val_kwargs.top_p", "--eval-top-p"),
    _is(f"{_ROLLOUT}.val_kwargs.top_k", "--eval-top-k"),
    _noted(f"{_ROLLOUT}.val_kwargs.do_sample", "--eval-temperature 0 is greedy"),
    _is(f"{_ROLLOUT}.tensor_model_parallel_size", "--rollout-num-gpus-per-engine"),
    _is(f"{_ROLLOUT}.gpu_memory_utilization", "--sglang-mem-fraction-static"),
    _is(f"{_ROLLOUT}.max_num_seqs", "--sglang-max-running-requests"),
    _is(f"{_ROLLOUT}.max_model_len", "--sglang-context-length", unset="None"),
    _switch(f"{_ROLLOUT}.enforce_eager", "--sglang-disable-cuda-graph"),
    _switch(f"{_ROLLOUT}.enable_rollout_routing_replay", "--use-rollout-routing-replay"),
    _together(f"{_ROLLOUT}.engine_kwargs.sglang.*", "is `--sglang-X`"),
    _noted(f"{_ROLLOUT}.engine_kwargs.*", _SGLANG),
    *(_noted(f"{_ROLLOUT}.{key}", _SGLANG) for key in
      ("name", "mode", "free_cache_engine", "enable_chunked_prefill", "max_num_batched_tokens", "layered_summon",
       "enable_prefix_caching", "enable_sleep_mode", "multi_stage_wake_up", "disable_log_stats", "skip_tokenizer_init",
       "dtype", "trace.*", "prometheus.*", "agent.*")),
    _noted(f"{_ROLLOUT}.load_format", "engines start empty, and the first publication brings their weights"),
    _noted(f"{_ROLLOUT}.calculate_log_probs", "engines always return log-probs"),
    _noted(f"{_ROLLOUT}.ignore_eos", "an answer ends where the model ends it", "False"),
    *(_noted(f"{_ROLLOUT}.{key}", "lengths are those of data.max_prompt_length and data.max_response_length") for key in
      ("prompt_length", "response_length")),
    *(_noted(f"{_ROLLOUT}.{key}", _PACKED) for key in
      ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu",
       "log_prob_use_dynamic_bsz")),
    _noted(f"{_ROLLOUT}.over_sample_rate", "--extra-samples-per-prompt begins more samples than are trained", "0"),
    _noted(f"{_ROLLOUT}.data_parallel_size", "engines are --rollout-num-gpus over --rollout-num-gpus-per-engine"),
    _is(f"{_ROLLOUT}.expert_parallel_size", "--sglang-ep-size"),
    _noted(f"{_ROLLOUT}.checkpoint_engine.*", "--weight-transport says how weights reach engines"),
    _choice(f"{_ROLLOUT}.multi_turn.enable", _TOOLS, False_=""),
    _is(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "--max-turns", unset="None"),
    _refused(f"{_ROLLOUT}.multi_turn.*", _TOOLS),
    # Rewards.
    _refused("custom_reward_function.*", _HOOK),
    _choice("reward_model.enable", _JUDGE, False_=""),
    _noted("reward_model.reward_manager", "--rm-type names the reward"),
    _together("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "with len: `--overlong-buffer-len`"),
    _together("reward_model.reward_kwargs.overlong_buffer_cfg.len", "is `--overlong-buffer-len`"),
    _together("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "is `--overlong-penalty-factor`"),
    _noted("reward_model.reward_kwargs.*", "lengths are those of --rollout-max-response-len"),
    _noted("reward_model.use_reward_loop", "rewards always are computed while others are generated"),
    _noted("reward_model.num_workers", "--rm-workers bounds processes that check answers"),
    _noted("reward_model.launch_reward_fn_async", "rewards always are computed while others are generated"),
    _refused("reward_model.sandbox_fusion.*", "programs run in a sandbox of this machine: --rm-type code"),
    _refused("reward_model.*", _JUDGE),
    *(_together(f"{new}*" if new.endswith(".") else new, f"was {old.removesuffix('.')}, whose line says the rest")
      for new, old in RENAMED.items()),
    *(_refused(f"reward.{key}", _HOOK) for key in ("reward_manager.*", "compute_score_kwargs.*")),
    # The critic.
    _is("critic.optim.lr", "--critic-lr", _GAE),
    _is("critic.optim.lr_warmup_steps", "--critic-lr-warmup-iters", _GAE, unset="-1", null="None"),
    replace(_choice("critic.optim.lr_warmup_steps_ratio", "other shares: give `--critic-lr-warmup-iters`",
                    **{"0": "", "0.0": ""}), when=_GAE),
    _is("critic.cliprange_value", "--value-clip", _GAE),
    _is("critic.model.path", "--critic-hf-checkpoint", _GAE),
    _noted("critic.*", _CRITIC),
    # The run.
    _together("trainer.nnodes", "is `--actor-num-nodes`; engines get separate GPUs, `--rollout-num-gpus`"),
    _together("trainer.n_gpus_per_node", "is `--actor-num-gpus-per-node`, as above"),
    _is("trainer.total_training_steps", "--num-rollout", unset="None"),
    _together("trainer.total_epochs", "give `--num-rollout`: prompts times epochs over data.train_batch_size"),
    _together("trainer.save_freq", "is `--save-interval`, with --save"),
    _together("trainer.default_local_dir", "is `--save`"),
    _is("trainer.test_freq", "--eval-interval", unset="-1"),
    _together("trainer.max_actor_ckpt_to_keep", "is `--save-keep-last`, with save_freq"),
    _noted("trainer.max_critic_ckpt_to_keep", "the critic is a part of the checkpoints"),
    _together("trainer.logger", "with wandb, tensorboard, mlflow, trackio or swanlab in it `--use-wandb` and the like; "
              "metrics.jsonl is always written"),
    _is("trainer.project_name", "--wandb-project"),
    _is("trainer.experiment_name", "--wandb-group"),
    _noted("trainer.resume_mode", "auto is --load with the directory of --save; --max-run-restarts restarts a run"),
    _is("trainer.resume_from_path", "--load", unset="None"),
    _noted("trainer.val_before_train", "the first and the last weights are always evaluated"),
    _noted("trainer.log_val_generations", "it logs answers of the validation: here they are in samples/ of "
           "the run directory, and W&B gets tables of them"),
    _noted("trainer.balance_batch", "tokens always are balanced over data-parallel ranks"),
    _is("trainer.critic_warmup", "--num-critic-only-steps", _GAE, unset="0"),
    _noted("trainer.use_legacy_worker_impl", "it chooses among verl's own parts"),
    _noted("trainer.device", "--device says where models run"),
    _noted("trainer.ray_wait_register_center_timeout", "deadlines are the run's own"),
    _noted(f"{_ACTOR}.checkpoint.*", "a checkpoint holds all that training needs; --save-hf exports weights"),
    _noted(f"{_ACTOR}.profiler.*", "--profile-step profiles one training step"),
    _noted(f"{_ROLLOUT}.profiler.*", "engines are not profiled"),
    _noted("global_profiler.*", "PyTorch's profiler is not part of a run"),
    _noted("ray_kwargs.*", "--ray-address joins a cluster, else the run starts its own"),
    _noted("transfer_queue.*", "batches go through Ray's object store"),
    # Its asynchronous trainer.
    _together("rollout.nnodes", "with rollout.n_gpus_per_node `--rollout-num-gpus`"),
    _together("rollout.n_gpus_per_node", "as above"),
    _is("rollout.n", "--n-samples-per-prompt"),
    _is("rollout.test_freq", "--eval-interval"),
    _together("rollout.total_rollout_steps", "give `--num-rollout`: it counts prompts, over data.train_batch_size"),
    _noted("rollout.total_epochs", "--num-rollout says when the run ends"),
    _is("async_training.trigger_parameter_sync_step", "--update-weights-interval"),
    _noted("async_training.staleness_threshold", "a share of samples; --max-weight-staleness bounds each one's age"),
    _noted("async_training.partial_rollout", "--pause-generation-mode says how generation continues"),
    _noted("async_training.*", "sides always are apart, and --use-rollout-logprobs corrects for age"),
)  # fmt: skip
"""The first row that fits a key counts."""

DEFAULTS = {
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    f"{_ACTOR}.ppo_mini_batch_size": "256",
    f"{_ROLLOUT}.n": "1",
    f"{_ROLLOUT}.tensor_model_parallel_size": "2",
    f"{_ROLLOUT}.gpu_memory_utilization": "0.5",
    f"{_OPTIM}.weight_decay": "0.01",
    f"{_OPTIM}.betas": "[0.9,0.999]",
    _ESTIMATOR: "gae",
    "critic.optim.lr": "1e-5",
    "critic.cliprange_value": "0.5",
    f"{_ACTOR}.policy_loss.ppo_kl_coef": "0.1",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
}
"""verl's defaults (trainer/config/ppo_megatron_trainer.yaml) that differ from ours."""


def older_name(key: str) -> str:
    """The key that has a row in the table.

    >>> older_name("reward.reward_kwargs.max_resp_len"), older_name("trainer.nnodes")
    ('reward_model.reward_kwargs.max_resp_len', 'trainer.nnodes')
    """
    for new, old in RENAMED.items():
        if key == new or (new.endswith(".") and key.startswith(new)):
            return old + key.removeprefix(new)
    return key


def row_of(key: str) -> VerlKey | None:
    """The row of a key; None if verl's recipes were not seen to use it."""
    for row in KEYS:
        if row.key == key or (row.key.endswith(".*") and key.startswith(row.key.removesuffix("*"))):
            return row
    return None
