"""Keys of verl's configuration (0.8), written on its command line as ``key=value``: what becomes of each here.

``verl.py`` applies the table; ``miles-async migrate --table verl`` prints it. Keys whose meaning depends on others
(batches, GPUs, the KL in the reward) are worked out there and have the verdict works here.
"""

from __future__ import annotations

from dataclasses import replace

from miles_async.arguments.algorithm_checks import LOSSES_WITH
from miles_async.commands.migrate.verl_row import (
    VerlKey,
    When,
    choice,
    is_flag,
    noted,
    refused,
    switch,
    together,
)

_PACKED = "samples are packed: --max-tokens-per-gpu is the size of a micro-batch"
_SGLANG = "SGLang generates, with CUDA graphs, its own chunks and caches: --sglang-X reaches it"
_MEMORY = (
    "Megatron trains here, and keeps weights where they are: --recompute-granularity, and --optimizer-cpu-offload "
    "with --use-precision-aware-optimizer"
)
_REFERENCE = "the reference has the trainer's layout, and is packed like its batches"
_LONG = "prompts that are too long are skipped, and counted"
_TOOLS = "tools are an environment of yours, --environment-path module:attr; docs/agents.md has an example"
_JUDGE = "a reward model is a service: --rm-type remote_rm --rm-url URL, or --rm-type judge --judge-url URL"
_TEACHER = (
    "learn from the log-probs of a teacher by `--use-opd`, the reverse KL of sampled tokens; docs/algorithms.md has an "
    "example"
)
_CRITIC = "with adv_estimator gae the trainer's ranks have a critic, of the policy's layout, batches and weight decay"
_HOOK = "a reward is called with (prompt, sample): --custom-rm-path module:attr"
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"
_ESTIMATOR, _LOSS_MODE = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_GAE = When(_ESTIMATOR, ("gae",))
_ADAPTED, _ADAPTED_BY_MEGATRON = (
    When(f"{_MODEL}.{rank}", ("0", None), others=True) for rank in ("lora_rank", "lora.rank")
)
_MULTI_TURN = When(f"{_ROLLOUT}.multi_turn.enable", ("True",))
_CORRECTION = "algorithm.rollout_correction"
_BYPASS, _WEIGHTS = f"{_CORRECTION}.bypass_mode", ("token", "sequence", "geometric")
_REJECTION = (
    "`--use-rs` and its flags reject tokens and sequences, which still count in the mean of the loss; in verl they do "
    "not"
)
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

WARM_UPS: dict[str, tuple[str, When | None]] = {
    f"{_OPTIM}.lr_warmup_steps": ("--lr-warmup-iters", None),
    "critic.optim.lr_warmup_steps": ("--critic-lr-warmup-iters", _GAE),
}
"""Key, in rollout batches → our flag, in optimizer steps, and when it counts."""

KEYS: tuple[VerlKey, ...] = (
    # Prompts.
    *(together(f"data.{key}", f"is `{flag}`, with names of folders before files that share a name") for key, flag in
      (("train_files", "--prompt-data"), ("val_files", "--eval-prompt-data"))),
    is_flag("data.prompt_key", "--input-key"),
    is_flag("data.max_prompt_length", "--rollout-max-prompt-len"),
    is_flag("data.max_response_length", "--rollout-max-response-len"),
    is_flag("data.train_batch_size", "--rollout-batch-size"),
    switch("data.shuffle", "--rollout-shuffle", off=("--no-rollout-shuffle",)),
    is_flag("data.seed", "--rollout-seed", unset="None"),
    noted("data.truncation", _LONG),
    noted("data.filter_overlong_prompts", _LONG),
    noted("data.filter_overlong_prompts_workers", _LONG),
    noted("data.reward_fn_key", "the reward is --rm-type for all rows, or rm_type in the metadata of one"),
    *(noted(f"data.{key}", "prompts are read when they are needed") for key in
      ("return_raw_chat", "return_full_prompt", "val_batch_size", "gen_batch_size", "dataloader_num_workers",
       "use_shm")),
    noted("data.return_multi_modal_inputs", "engines and trainer make the model's inputs from the images of a row"),
    switch("data.trust_remote_code", "--trust-remote-code"),
    refused("data.apply_chat_template_kwargs.*", "set their defaults in chat_template.jinja of --hf-checkpoint"),
    refused("data.custom_cls.*", "write the prompts to a file first, or name a data set of the hub: --prompt-data"),
    refused("data.sampler.*", "a sampler orders the rows of an epoch: --prompt-sampler module:attr"),
    together("data.image_key", """images is `--multimodal-keys '{"image": "images"}'`"""),
    refused("data.video_key", "models that read videos are not trained"),
    switch(f"{_ACTOR}.freeze_vision_tower", "--freeze-vision-tower", off=("--no-freeze-vision-tower",)),
    # The model.
    VerlKey(f"{_MODEL}.path", "works", "is `--hf-checkpoint`, a directory", flag="--hf-checkpoint"),
    is_flag(f"{_MODEL}.lora_rank", "--lora-rank"),
    is_flag(f"{_MODEL}.lora_alpha", "--lora-alpha", _ADAPTED),
    is_flag(f"{_MODEL}.lora.rank", "--lora-rank"),
    is_flag(f"{_MODEL}.lora.alpha", "--lora-alpha", _ADAPTED_BY_MEGATRON),
    is_flag(f"{_MODEL}.lora.type", "--lora-type", _ADAPTED_BY_MEGATRON),
    is_flag(f"{_MODEL}.target_modules", "--target-modules", _ADAPTED, all="all-linear"),
    is_flag(f"{_MODEL}.lora.target_modules", "--target-modules", _ADAPTED_BY_MEGATRON, all="all-linear"),
    is_flag(f"{_MODEL}.lora_adapter_path", "--lora-adapter-path", unset="None"),
    replace(noted(f"{_MODEL}.exclude_modules", "only layers of the language model get adapters, those that "
                   "--target-modules names", "None", ".*visual.*"), when=_ADAPTED),
    replace(noted(f"{_MODEL}.lora.dropout", "engines have no dropout", "0", "0.0"), when=_ADAPTED_BY_MEGATRON),
    noted(f"{_MODEL}.lora.lora_A_init_method", "the first matrix is drawn, the second is 0"),
    noted(f"{_MODEL}.lora.merge", "adapters are published merged into the weights"),
    switch(f"{_MODEL}.enable_gradient_checkpointing", "--recompute-granularity", "full",
            note="True is `--recompute-granularity full`"),
    noted(f"{_MODEL}.enable_activation_offload", _MEMORY, "False"),
    *(noted(f"{_MODEL}.{key}", "Megatron's layers take packed samples, and log-probs come in chunks") for key in
      ("use_remove_padding", "use_fused_kernels", "fused_kernel_options.*", "use_liger", "use_shm",
       "external_lib")),
    switch(f"{_MODEL}.trust_remote_code", "--trust-remote-code"),
    noted(f"{_MODEL}.override_config.*", "config.json of --hf-checkpoint describes the model"),
    choice(f"{_MODEL}.custom_chat_template", "put it into chat_template.jinja of --hf-checkpoint", None_=""),
    noted(f"{_MODEL}.mtp.*", "--enable-mtp-training trains layers for multi-token prediction"),
    # The trainer's ranks.
    is_flag(f"{_MEGATRON}.tensor_model_parallel_size", "--tensor-model-parallel-size"),
    is_flag(f"{_MEGATRON}.pipeline_model_parallel_size", "--pipeline-model-parallel-size"),
    is_flag(
        f"{_MEGATRON}.virtual_pipeline_model_parallel_size", "--num-virtual-stages-per-pipeline-rank", unset="None"
    ),
    is_flag(f"{_MEGATRON}.context_parallel_size", "--context-parallel-size"),
    is_flag(f"{_MEGATRON}.expert_model_parallel_size", "--expert-model-parallel-size"),
    is_flag(f"{_MEGATRON}.expert_tensor_parallel_size", "--expert-tensor-parallel-size", unset="None"),
    *(is_flag(f"{_ACTOR}.{key}", "--context-parallel-size") for key in
      ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size",
       "veomni.ulysses_parallel_size")),
    is_flag(f"{_ACTOR}.veomni.expert_parallel_size", "--expert-model-parallel-size"),
    switch(f"{_MEGATRON}.sequence_parallel", off=("--no-sequence-parallel",)),
    is_flag(f"{_MEGATRON}.seed", "--seed"),
    *(is_flag(f"{_MEGATRON}.override_transformer_config.num_layers_in_{end}_pipeline_stage",
              f"--decoder-{end}-pipeline-num-layers", unset="None") for end in ("first", "last")),
    *(noted(f"{_MEGATRON}.override_transformer_config.account_for_{part}_in_pipeline_split",
             "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers", "False") for part in
      ("embedding", "loss")),
    *(together(f"{_MEGATRON}.{key}.*", "is the flag `--X` of the same name, or `--megatron-X`") for key in
      ("override_transformer_config", "override_ddp_config")),
    together(f"{_OPTIM}.override_optimizer_config.*", "is the flag `--X` of the same name, or `--megatron-X`"),
    *(noted(f"{_MEGATRON}.{key}", _MEMORY) for key in ("param_offload", "grad_offload", "optimizer_offload")),
    *(noted(f"{_MEGATRON}.{key}", "Megatron-Bridge reads and writes Hugging Face files") for key in
      ("use_mbridge", "vanilla_mbridge", "use_dist_checkpointing", "dist_checkpointing_path")),
    *(noted(f"{_MEGATRON}.{key}", "it always is") for key in ("use_distributed_optimizer", "use_remove_padding")),
    *(noted(key, "weights are read as bf16 on GPUs; what fp16 needs, a scaled loss, is not implemented", "bfloat16",
            "bf16") for key in (f"{_MEGATRON}.dtype", f"{_MODEL}.torch_dtype")),
    *(noted(f"{_ACTOR}.{key}.*", _MEMORY) for key in ("fsdp_config", "veomni")),
    noted(f"{_ACTOR}.strategy", "Megatron trains"),
    noted("model_engine", "Megatron trains"),
    noted(f"{_ACTOR}.use_torch_compile", "Megatron's layers are used"),
    *(noted(f"{_ACTOR}.{key}", "entropy comes in chunks, as log-probs do") for key in
      ("entropy_checkpointing", "entropy_from_logits_with_chunking")),
    together("actor_rollout_ref.nccl_timeout", "is `--distributed-timeout-minutes`, in minutes"),
    noted("actor_rollout_ref.hybrid_engine", "sides are apart, or take turns with --colocate"),
    noted("actor_rollout_ref.ref.*", _REFERENCE),
    # The optimizer and its batches.
    is_flag(f"{_OPTIM}.lr", "--lr"),
    is_flag(f"{_OPTIM}.min_lr", "--min-lr"),
    is_flag(f"{_OPTIM}.weight_decay", "--weight-decay"),
    *(replace(together(key, f"times `--num-steps-per-rollout` and `--ppo-epochs` it is `{flag}`"), when=when)
      for key, (flag, when) in WARM_UPS.items()),
    *(is_flag(f"{key}_ratio", flag.replace("-iters", "-fraction"), When(key, (None, "None", "-1")), none="0", no="0.0")
      for key, (flag, _) in WARM_UPS.items()),
    is_flag(f"{_OPTIM}.lr_decay_style", "--lr-decay-style"),
    is_flag(f"{_OPTIM}.warmup_style", "--lr-decay-style", unset="None"),
    is_flag(f"{_OPTIM}.lr_scheduler_type", "--lr-decay-style"),
    is_flag(f"{_OPTIM}.clip_grad", "--clip-grad"),
    is_flag(f"{_ACTOR}.grad_clip", "--clip-grad"),
    together(f"{_OPTIM}.betas", "are `--adam-beta1` and `--adam-beta2`"),
    noted(f"{_OPTIM}.optimizer", "AdamW is the optimizer", "adam", "AdamW"),
    noted(f"{_OPTIM}.total_training_steps", "the schedule ends with the run"),
    noted(f"{_OPTIM}.lr_decay_steps", "the schedule ends with the run"),
    together(f"{_ACTOR}.ppo_mini_batch_size", "is `--num-steps-per-rollout`: data.train_batch_size over it"),
    is_flag(f"{_ACTOR}.ppo_epochs", "--ppo-epochs"),
    is_flag(f"{_ACTOR}.ppo_max_token_len_per_gpu", "--max-tokens-per-gpu"),
    *(noted(f"{_ACTOR}.{key}", _PACKED) for key in
      ("use_dynamic_bsz", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")),
    noted(f"{_ACTOR}.shuffle", "samples are balanced over ranks, in an order that the seed decides"),
    noted(f"{_ACTOR}.use_prefix_grouper", "it saves time alone; --share-prefixes does, with --device cpu"),
    # Advantages and loss.
    choice(
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
    switch("algorithm.norm_adv_by_std_in_grpo", off=("--no-grpo-std-normalization",)),
    together("algorithm.use_kl_in_reward", "with kl_ctrl.kl_coef: for adv_estimator gae `--kl-coef X`, for "
              "reinforce_plus_plus `--token-advantages kl_in_reward --kl-coef X`; for others give `--use-kl-loss`"),
    together("algorithm.kl_ctrl.kl_coef", "is `--kl-coef`, with use_kl_in_reward"),
    together("algorithm.kl_penalty", "is `--kl-reward-type`: kl is k1, mse k2, with use_kl_in_reward"),
    noted("algorithm.kl_ctrl.type", "fixed; for adaptive give `--kl-target` and `--kl-horizon`", "fixed"),
    # Discounted rewards without a critic are not implemented, which train says.
    is_flag("algorithm.gamma", "--gamma", When(_ESTIMATOR, ("gae", "reinforce_plus_plus"))),
    is_flag("algorithm.lam", "--lambd", _GAE),
    noted("algorithm.use_pf_ppo", "it is not implemented", "False"),
    noted("algorithm.pf_ppo.*", "algorithm.use_pf_ppo switches it on, whose line says the rest"),
    switch("algorithm.filter_groups.enable", "--group-filter", "zero_variance",
            note="True is `--group-filter zero_variance`"),
    noted("algorithm.filter_groups.metric", "groups whose rewards are equal are replaced"),
    noted("algorithm.filter_groups.max_num_gen_batches", "a rejected group is replaced by one more, at once"),
    # With bypass_mode the ratio compares with the engines already, and verl adds no weight to that.
    replace(choice(f"{_CORRECTION}.rollout_is", "is `--use-tis`, without bypass_mode", None_="",
                    **{level: f"--use-tis --tis-level {level}" for level in _WEIGHTS}),
            when=When(_BYPASS, (None, "False"))),
    is_flag(f"{_CORRECTION}.rollout_is_threshold", "--tis-clip", When(f"{_CORRECTION}.rollout_is", _WEIGHTS)),
    switch(_BYPASS, "--use-rollout-logprobs"),
    replace(choice(f"{_CORRECTION}.loss_type", "for reinforce, `--policy-loss cispo` is REINFORCE, weighted by the "
                    "clipped ratio", ppo_clip=""), when=When(_BYPASS, ("True",))),
    choice(f"{_CORRECTION}.rollout_is_batch_normalize", "weights are not normalized: remove it", False_=""),
    choice(f"{_CORRECTION}.rollout_rs", _REJECTION, None_=""),
    *(noted(f"{_CORRECTION}.{key}", "a bound of rollout_rs, whose line says the rest") for key in
      ("rollout_rs_threshold", "rollout_rs_threshold_lower")),
    refused(f"{_CORRECTION}.*", _REJECTION),
    together(f"{_ACTOR}.use_kl_loss", "is `--use-kl-loss`, with the two below"),
    together(f"{_ACTOR}.kl_loss_coef", "is `--kl-loss-coef`, with use_kl_loss"),
    together(f"{_ACTOR}.kl_loss_type", "is `--kl-loss-type`: kl is k1, mse k2, with use_kl_loss"),
    is_flag(f"{_ACTOR}.entropy_coeff", "--entropy-coef"),
    is_flag(f"{_ACTOR}.clip_ratio", "--eps-clip", _read_by_losses("eps_clip")),
    is_flag(f"{_ACTOR}.clip_ratio_low", "--eps-clip", _read_by_losses("eps_clip")),
    is_flag(f"{_ACTOR}.clip_ratio_high", "--eps-clip-high", _read_by_losses("eps_clip_high")),
    is_flag(f"{_ACTOR}.clip_ratio_c", "--eps-clip-c", _read_by_losses("eps_clip_c")),
    *(is_flag(f"{_ACTOR}.{place}{key}", f"--{key.replace('_', '-')}", _read_by_losses(key))
      for key in ("tau_pos", "tau_neg") for place in ("", "policy_loss.")),
    choice(_LOSS_MODE, "vanilla is ppo_clip, geo_mean gmpo; for gpg, which has no ratio, cispo has a clipped one; else "
            "`--policy-loss` module:attr. The loss of gspo, sapo and geo_mean is a mean over sequences",
            **{mode: f"--policy-loss {loss}" + " --loss-aggregation sequence_mean" * (mode in _OF_SEQUENCES)
               for mode, loss in _LOSSES.items()}),
    *(is_flag(f"{_ACTOR}.policy_loss.{key}", f"--{key.replace('_', '-')}", _read_by_losses(key)) for key in
      ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")),
    replace(choice(f"{_ACTOR}.loss_agg_mode", "for others `--loss-aggregation` module:attr",
                    token__mean="--loss-aggregation token_mean",
                    seq__mean__token__mean="--loss-aggregation sequence_mean",
                    seq__mean__token__sum__norm="--loss-aggregation sequence_sum"), when=_AGGREGATED),
    is_flag(f"{_ACTOR}.loss_scale_factor", "--loss-length-normalizer", _AGGREGATED, unset="None"),
    *(choice(f"{place}.router_replay.mode", "R2 is `--use-routing-replay`, R3 `--use-rollout-routing-replay`",
              disabled="", R2="--use-routing-replay", R3="--use-rollout-routing-replay") for place in
      (_ACTOR, _MEGATRON)),
    choice("distillation.enabled", _TEACHER, False_=""),
    noted("distillation.*", "the teacher of --use-opd is a frozen group of engines, which --server-groups describes"),
    # Engines.
    is_flag(f"{_ROLLOUT}.n", "--n-samples-per-prompt"),
    is_flag(f"{_ROLLOUT}.temperature", "--rollout-temperature"),
    is_flag(f"{_ROLLOUT}.top_p", "--rollout-top-p"),
    is_flag(f"{_ROLLOUT}.top_k", "--rollout-top-k"),
    is_flag(f"{_ROLLOUT}.val_kwargs.n", "--n-samples-per-eval-prompt"),
    is_flag(f"{_ROLLOUT}.val_kwargs.temperature", "--eval-temperature"),
    is_flag(f"{_ROLLOUT}.val_kwargs.top_p", "--eval-top-p"),
    is_flag(f"{_ROLLOUT}.val_kwargs.top_k", "--eval-top-k"),
    noted(f"{_ROLLOUT}.val_kwargs.do_sample", "--eval-temperature 0 is greedy"),
    is_flag(f"{_ROLLOUT}.tensor_model_parallel_size", "--rollout-num-gpus-per-engine"),
    is_flag(f"{_ROLLOUT}.gpu_memory_utilization", "--sglang-mem-fraction-static"),
    is_flag(f"{_ROLLOUT}.max_num_seqs", "--sglang-max-running-requests"),
    choice(f"{_ROLLOUT}.quantization", "engines' weights are quantized as they are published", None_="",
           fp8="--rollout-quantization fp8"),
    is_flag(f"{_ROLLOUT}.max_model_len", "--sglang-context-length", unset="None"),
    switch(f"{_ROLLOUT}.enforce_eager", "--sglang-disable-cuda-graph"),
    switch(f"{_ROLLOUT}.enable_rollout_routing_replay", "--use-rollout-routing-replay"),
    together(f"{_ROLLOUT}.engine_kwargs.sglang.*", "is `--sglang-X`"),
    noted(f"{_ROLLOUT}.engine_kwargs.*", _SGLANG),
    choice(f"{_ROLLOUT}.agent.default_agent_loop", _TOOLS, single_turn_agent=""),
    choice(f"{_ROLLOUT}.agent.agent_loop_config_path", _TOOLS, None_=""),
    *(noted(f"{_ROLLOUT}.{key}", _SGLANG) for key in
      ("name", "mode", "free_cache_engine", "enable_chunked_prefill", "max_num_batched_tokens", "layered_summon",
       "enable_prefix_caching", "enable_sleep_mode", "multi_stage_wake_up", "disable_log_stats", "skip_tokenizer_init",
       "dtype", "sglang_rollout_mode", "server.*", "trace.*", "prometheus.*", "agent.*")),
    noted(f"{_ROLLOUT}.load_format", "engines start empty, and the first publication brings their weights"),
    noted(f"{_ROLLOUT}.calculate_log_probs", "engines always return log-probs"),
    noted(f"{_ROLLOUT}.ignore_eos", "an answer ends where the model ends it", "False"),
    *(noted(f"{_ROLLOUT}.{key}", "lengths are those of data.max_prompt_length and data.max_response_length") for key in
      ("prompt_length", "response_length")),
    *(noted(f"{_ROLLOUT}.{key}", _PACKED) for key in
      ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu",
       "log_prob_use_dynamic_bsz")),
    noted(f"{_ROLLOUT}.over_sample_rate", "--extra-samples-per-prompt begins more samples than are trained", "0"),
    noted(f"{_ROLLOUT}.data_parallel_size", "engines are --rollout-num-gpus over --rollout-num-gpus-per-engine"),
    is_flag(f"{_ROLLOUT}.expert_parallel_size", "--sglang-ep-size"),
    noted(f"{_ROLLOUT}.checkpoint_engine.*", "--weight-transport says how weights reach engines"),
    choice(f"{_ROLLOUT}.multi_turn.enable", _TOOLS, False_=""),
    is_flag(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "--max-turns", _MULTI_TURN, unset="None"),
    # Data can name an agent that uses these without multi_turn.enable.
    *(choice(f"{_ROLLOUT}.multi_turn.{key}", _TOOLS, None_="") for key in
      ("tool_config_path", "interaction_config_path")),
    noted(f"{_ROLLOUT}.multi_turn.*", "multi_turn.enable switches it on, whose line says the rest"),
    # Rewards.
    refused("custom_reward_function.*", _HOOK),
    choice("reward_model.enable", _JUDGE, False_=""),
    noted("reward_model.reward_manager", "--rm-type names the reward"),
    together("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "with len: `--overlong-buffer-len`"),
    together("reward_model.reward_kwargs.overlong_buffer_cfg.len", "is `--overlong-buffer-len`"),
    together("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "is `--overlong-penalty-factor`"),
    noted("reward_model.reward_kwargs.*", "lengths are those of --rollout-max-response-len"),
    noted("reward_model.use_reward_loop", "rewards always are computed while others are generated"),
    noted("reward_model.num_workers", "--rm-workers bounds processes that check answers"),
    noted("reward_model.launch_reward_fn_async", "rewards always are computed while others are generated"),
    refused("reward_model.sandbox_fusion.*", "programs run in a sandbox of this machine: --rm-type code"),
    noted("reward_model.reward_loop_source", "reward_loop_class_name has its line", "register"),
    *(choice(f"reward_model.reward_loop_{key}", _HOOK, None_="") for key in ("module_path", "class_name")),
    noted("reward_model.*", "reward_model.enable switches it on, whose line says the rest"),
    *(together(f"{new}*" if new.endswith(".") else new, f"was {old.removesuffix('.')}, whose line says the rest")
      for new, old in RENAMED.items()),
    *(refused(f"reward.{key}", _HOOK) for key in ("reward_manager.*", "compute_score_kwargs.*")),
    # The critic.
    is_flag("critic.optim.lr", "--critic-lr", _GAE),
    is_flag("critic.cliprange_value", "--value-clip", _GAE),
    is_flag("critic.model.path", "--critic-hf-checkpoint", _GAE),
    noted("critic.*", _CRITIC),
    # The run.
    together("trainer.nnodes", "is `--actor-num-nodes`; engines get separate GPUs, `--rollout-num-gpus`"),
    together("trainer.n_gpus_per_node", "is `--actor-num-gpus-per-node`, as above"),
    is_flag("trainer.total_training_steps", "--num-rollout", unset="None"),
    together("trainer.total_epochs", "is `--num-epoch`, without total_training_steps"),
    together("trainer.save_freq", "is `--save-interval`, with --save"),
    together("trainer.default_local_dir", "is `--save`"),
    is_flag("trainer.test_freq", "--eval-interval", unset="-1", never="0", off="False"),
    together("trainer.max_actor_ckpt_to_keep", "is `--save-keep-last`, with save_freq"),
    noted("trainer.max_critic_ckpt_to_keep", "the critic is a part of the checkpoints"),
    together("trainer.logger", "with wandb, tensorboard, mlflow, trackio or swanlab in it `--use-wandb` and the like; "
              "metrics.jsonl is always written"),
    is_flag("trainer.project_name", "--wandb-project"),
    is_flag("trainer.experiment_name", "--wandb-group"),
    noted("trainer.resume_mode", "auto is --load with the directory of --save; --max-run-restarts restarts a run"),
    is_flag("trainer.resume_from_path", "--load", unset="None"),
    noted("trainer.val_before_train", "the first and the last weights are always evaluated"),
    noted("trainer.log_val_generations", "it logs answers of the validation: here they are in samples/ of "
           "the run directory, and W&B gets tables of them"),
    noted("trainer.balance_batch", "tokens always are balanced over data-parallel ranks"),
    replace(together("trainer.critic_warmup", "minus 1 it is `--num-critic-only-steps`: verl counts steps from 1"),
            when=_GAE),
    noted("trainer.use_legacy_worker_impl", "it chooses among verl's own parts"),
    noted("trainer.device", "--device says where models run"),
    noted("trainer.ray_wait_register_center_timeout", "deadlines are the run's own"),
    noted(f"{_ACTOR}.checkpoint.*", "a checkpoint holds all that training needs; --save-hf exports weights"),
    noted(f"{_ACTOR}.profiler.*", "--profile-step profiles one training step"),
    noted(f"{_ROLLOUT}.profiler.*", "engines are not profiled"),
    noted("global_profiler.*", "PyTorch's profiler is not part of a run"),
    noted("ray_kwargs.*", "--ray-address joins a cluster, else the run starts its own"),
    noted("transfer_queue.*", "batches go through Ray's object store"),
    # Its asynchronous trainers.
    together("rollout.nnodes", "with rollout.n_gpus_per_node `--rollout-num-gpus`"),
    together("rollout.n_gpus_per_node", "as above"),
    noted("rollout.n", f"{_ROLLOUT}.n counts"),
    together("rollout.test_freq", "is `--eval-interval`, times trigger_parameter_sync_step"),
    together("rollout.total_rollout_steps", "prompts: `--num-rollout` is this over ppo_mini_batch_size and "
              "require_batches"),
    noted("rollout.total_epochs", "--num-rollout says when the run ends"),
    together("async_training.require_batches", "is `--num-steps-per-rollout`; times ppo_mini_batch_size it is "
              "`--rollout-batch-size`"),
    is_flag("async_training.trigger_parameter_sync_step", "--update-weights-interval"),
    noted("async_training.staleness_threshold", "a share of samples; --max-weight-staleness bounds each one's age"),
    noted("async_training.partial_rollout", "--pause-generation-mode says how generation continues"),
    noted("async_training.*", "sides always are apart, and --use-rollout-logprobs corrects for age"),
)  # fmt: skip
"""The first row that fits a key counts."""


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
