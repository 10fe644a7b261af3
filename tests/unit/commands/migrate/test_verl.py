"""Keys of verl's configuration become flags that exist, and what has no counterpart is named with what to do.

# covers: P8
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.parser import build_parser, parse_arguments
from miles_async.arguments.pass_through import is_pass_through
from miles_async.commands.migrate.command import VERL, refusals
from miles_async.commands.migrate.verl import FULLY_ASYNC, from_verl
from miles_async.commands.migrate.verl_defaults import DEFAULTS
from miles_async.commands.migrate.verl_keys import KEYS, row_of

OURS = list(build_parser("miles-async train")._option_string_actions)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL_KEYS = "actor_rollout_ref.model"
LOSS = f"{ACTOR}.policy_loss"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"


def test_flags_that_rows_name_exist() -> None:
    texts = [
        text for row in KEYS for text in (row.note, row.flag or "", *(w for ws in row.values.values() for w in ws))
    ]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]*\w", text)}
    unknown = [flag for flag in named if flag not in OURS and not is_pass_through(flag, OURS)]
    assert [flag for flag in unknown if next(as_megatron_flags([flag], OURS)) == flag] == []


def test_words_of_rows_are_read_by_train() -> None:
    for row in KEYS:
        for words in row.values.values():
            parse_arguments(list(words))
    parse_arguments(from_verl(()).words)


def test_no_row_hides_a_later_one() -> None:
    for row in KEYS:
        key = row.key.removesuffix(".*") + (".x" if row.key.endswith(".*") else "")
        assert row_of(key) is row
    assert [key for key in DEFAULTS if row_of(key) is None] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.max_response_length=8192", "--rollout-max-response-len 8192"),
        ("data.train_files=['/d/a.parquet']", "--prompt-data /d/a.parquet"),
        ("data.train_files=[a.parquet,b.parquet]", "--prompt-data a.parquet b.parquet"),
        ("data.val_files=[/d/a.parquet,/d/b.parquet]", "--eval-prompt-data /d/a.parquet /d/b.parquet"),
        (f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full", "--recompute-granularity full"),
        (f"++{ACTOR}.megatron.override_transformer_config.moe_permute_fusion=true", "--moe-permute-fusion"),
        (f"{ACTOR}.megatron.override_transformer_config.apply_rope_fusion=False", "--apply-rope-fusion false"),
        (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", "--sglang-attention-backend fa3"),
        (f"{ROLLOUT}.enforce_eager=True", "--sglang-disable-cuda-graph"),
        (f"{ROLLOUT}.quantization=fp8", "--rollout-quantization fp8"),
        (f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=5",
         "--use-tis --tis-level sequence --tis-clip 5"),
        (f"{CORRECTION}.rollout_is=token {CORRECTION}.bypass_mode=True", "--use-rollout-logprobs"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "--no-grpo-std-normalization"),
        (f"algorithm.adv_estimator=rloo {ROLLOUT}.n=2", "--advantage-estimator rloo"),
        (f"{MODEL_KEYS}.lora_rank=8 {MODEL_KEYS}.lora_alpha=16 {MODEL_KEYS}.target_modules=[q_proj]",
         "--lora-rank 8 --lora-alpha 16 --target-modules q_proj"),
        (f"{MODEL_KEYS}.lora.rank=8 {MODEL_KEYS}.lora.alpha=16 {MODEL_KEYS}.lora.target_modules=[linear_qkv]",
         "--lora-rank 8 --lora-alpha 16 --target-modules linear_qkv"),
        ("algorithm.gamma=0.9 algorithm.lam=0.95", "--gamma 0.9 --lambd 0.95"),
        (f"data.train_batch_size=256 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.optim.lr_warmup_steps=10",
         "--num-steps-per-rollout 8 --lr-warmup-iters 80"),
        ("critic.optim.lr=2e-5", "--critic-lr 2e-5 --value-clip 0.5"),
        (f"{ACTOR}.ppo_epochs=3 critic.optim.lr_warmup_steps=7", "--critic-lr-warmup-iters 84"),
        ("critic.model.path=/m", "--critic-lr 1e-5 --value-clip 0.5 --critic-hf-checkpoint /m"),
        ("critic.cliprange_value=0.3", "--value-clip 0.3"),
        ("trainer.critic_warmup=5", "--num-critic-only-steps 4"),  # steps are counted from 1
        (f"{LOSS}.loss_mode=geo_mean", "--policy-loss gmpo --loss-aggregation sequence_mean"),
        (f"{LOSS}.loss_mode=gspo", "--policy-loss gspo --loss-aggregation sequence_mean"),
        (f"{LOSS}.loss_mode=dppo_tv {ACTOR}.clip_ratio_high=0.3", "--policy-loss dppo_tv --eps-clip-high 0.3"),
        (f"{LOSS}.loss_mode=kl_cov", "--ppo-kl-coef 0.1 --policy-loss kl_cov"),
        (f"{LOSS}.loss_mode=kl_cov {LOSS}.kl_cov_ratio=0.002", "--policy-loss kl_cov --kl-cov-ratio 0.002"),
        (f"{LOSS}.loss_mode=sapo {LOSS}.tau_pos=2 {LOSS}.tau_neg=3", "--tau-pos 2 --tau-neg 3"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "--loss-aggregation sequence_mean"),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse", "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k2"),
        (
            "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.1",
            "--token-advantages kl_in_reward --kl-coef 0.1 --kl-reward-type k1",
        ),
        (f"{OVERLONG}.enable=True {OVERLONG}.len=512", "--overlong-buffer-len 512 --overlong-penalty-factor 1.0"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=256",
         "--overlong-buffer-len 256 --overlong-penalty-factor 1.0"),
        (f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=16", "--num-steps-per-rollout 4"),
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=4",
            "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8",
        ),
        ("trainer.n_gpus_per_node=4 rollout.nnodes=3 rollout.n_gpus_per_node=8", "--rollout-num-gpus 24"),
        (f"{ACTOR}.optim.betas=[0.9,0.95]", "--adam-beta1 0.9 --adam-beta2 0.95"),
        ("trainer.save_freq=5 trainer.default_local_dir=/c", "--save /c --save-interval 5"),
        ("trainer.max_actor_ckpt_to_keep=2 trainer.save_freq=5", "--save-interval 5 --save-keep-last 2"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4", "--context-parallel-size 4"),
        (f"{ACTOR}.veomni.ulysses_parallel_size=2 {ACTOR}.veomni.expert_parallel_size=8 {ACTOR}.veomni.fsdp_size=4",
         "--context-parallel-size 2 --expert-model-parallel-size 8"),
        (f"{ACTOR}.megatron.router_replay.mode=R3", "--use-rollout-routing-replay"),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", "--lr-decay-style cosine"),
        ("data.val_files=['/d/a/test.parquet','/d/b/test.parquet','/d/c.parquet']",
         "--eval-prompt-data a /d/a/test.parquet b /d/b/test.parquet /d/c.parquet"),
        ("data.train_files=[/d/gsm8k/train.parquet,/d/math/train.parquet]",
         "--prompt-data gsm8k /d/gsm8k/train.parquet math /d/math/train.parquet"),
        (f"+{TRANSFORMER}.num_layers_in_first_pipeline_stage=3 +{TRANSFORMER}.num_layers_in_last_pipeline_stage=6",
         "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 6"),
        ("data.image_key=pictures", '--multimodal-keys {"image": "pictures"}'),
        ("trainer.logger=[console,wandb]", "--use-wandb"),
        ("trainer.logger=['swanlab','tensorboard']", "--use-tensorboard --use-swanlab"),
        ("actor_rollout_ref.nccl_timeout=1200", "--distributed-timeout-minutes 20"),
    ],
)  # fmt: skip
def test_what_keys_become(overrides: str, words: str) -> None:
    done = from_verl(overrides.split())
    assert words in " ".join(done.words)
    assert done.unmapped == []


@pytest.mark.parametrize(
    ("override", "absent"),
    [
        ("trainer.test_freq=-1", "--eval-interval"),
        ("trainer.test_freq=False", "--eval-interval"),
        (f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=null", "--num-virtual-stages-per-pipeline-rank"),
        (f"{ACTOR}.use_kl_loss=False", "--use-kl-loss"),
        (f"{ACTOR}.kl_loss_coef=0.1", "--kl-loss-coef"),
        ("actor_rollout_ref.model.target_modules=all-linear", "--target-modules"),
        ("trainer.max_actor_ckpt_to_keep=2", "--save-keep-last"),
        (f"{ACTOR}.optim.lr_warmup_steps=null", "--lr-warmup-iters"),
        (f"{ACTOR}.optim.lr_warmup_steps=0", "--lr-warmup-iters"),
        ("trainer.critic_warmup=0", "--num-critic-only-steps"),
        ("trainer.critic_warmup=1", "--num-critic-only-steps"),
        ("algorithm.adv_estimator=grpo trainer.critic_warmup=5", "--num-critic-only-steps"),
        (f"{CORRECTION}.rollout_is=token {CORRECTION}.bypass_mode=True", "--use-tis"),
        (f"{CORRECTION}.rollout_is_threshold=5", "--tis-clip"),
        (f"{CORRECTION}.rollout_rs=null {CORRECTION}.rollout_rs_threshold=null", "--use-rs"),
        ("actor_rollout_ref.nccl_timeout=null", "--distributed-timeout-minutes"),
        (f"{ROLLOUT}.quantization=null", "--sglang-quantization"),
        ("algorithm.use_kl_in_reward=True", "kl_in_reward"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.0", "--kl-coef"),
        ("algorithm.adv_estimator=grpo", "--critic-lr"),
        (f"{LOSS}.loss_mode=sapo", "--ppo-kl-coef"),
        ("data.val_files=null", "--eval-prompt-data"),
        ("data.image_key=null", "--multimodal-keys"),
        (f"{TRANSFORMER}.num_layers_in_last_pipeline_stage=null", "--decoder-last-pipeline-num-layers"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns=5", "--max-turns"),
        (f"{ROLLOUT}.multi_turn.enable=False", "--max-turns"),
        ("reward_model.enable=False", "--rm-url"),
        ("data.custom_cls.path=null", "custom_cls"),
        ("--config-path=config --config-name=ppo_megatron_trainer.yaml", "--max-turns"),
    ],
)
def test_what_is_off_or_a_default_says_nothing(override: str, absent: str) -> None:
    done = from_verl(override.split())
    assert absent not in done.words
    assert done.unmapped == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator=remax: expected gae, grpo"),
        (f"{LOSS}.loss_mode=gpg", "for gpg, which has no ratio, cispo has a clipped one"),
        ("distillation.enabled=True", "by `--use-opd`, the reverse KL of sampled tokens"),
        (f"{ROLLOUT}.ignore_eos=True", "an answer ends where the model ends it"),
        (f"{ACTOR}.megatron.dtype=float16", "what fp16 needs, a scaled loss, is not implemented"),
        ("reward.custom_reward_function.path=r.py", "reward.custom_reward_function.path=r.py: a reward is called"),
        ("reward.compute_score_kwargs.method=flexible", "--custom-rm-path"),
        ("algorithm.kl_ctrl.type=adaptive", "--kl-target"),
        (f"{ACTOR}.ppo_mini_batch_size=100", "give --num-steps-per-rollout"),
        ("trainer.critic_warmup=$N", "give --num-critic-only-steps, this minus 1"),
        ("actor_rollout_ref.nccl_timeout=$T", "give --distributed-timeout-minutes, this over 60"),
        (f"{CORRECTION}.rollout_rs=token", "which still count in the mean of the loss; in verl they do not"),
        ("actor_rollout_ref.model.torch_dtype=float16", "what fp16 needs, a scaled loss, is not implemented"),
        (
            f"{ROLLOUT}.multi_turn.enable=True {ROLLOUT}.multi_turn.format=hermes",
            "--environment-path module:attr",
        ),
        (f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml", "--environment-path module:attr"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent", "--environment-path module:attr"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=a.yaml", "--environment-path module:attr"),
        ("reward_model.reward_loop_class_name=Mine", "--custom-rm-path module:attr"),
        ("actor_rollout_ref.model.custom_chat_template={{x}}", "chat_template.jinja of --hf-checkpoint"),
        ("--config-name my_ppo_trainer", "my_ppo_trainer.yaml was not found"),
        ("--config-path=/mine --config-name=ppo_trainer", "/mine/ppo_trainer.yaml was not found"),
        ("--config-path=/mine", "/mine/ppo_trainer.yaml was not found"),
        (
            "reward_model.enable=True reward_model.model.path=m reward.reward_model.rollout.name=vllm",
            "--rm-type remote_rm",
        ),
        ("--config-name no_such_file", "no_such_file.yaml was not found, so its values are missing"),
        (
            f"{MODEL_KEYS}.lora_rank=8 {MODEL_KEYS}.exclude_modules=.*mlp.*",
            "only layers of the language model get adapters",
        ),
        (f"{TRANSFORMER}.account_for_loss_in_pipeline_split=True", "--decoder-last-pipeline-num-layers"),
        ("custom_reward_function.path=r.py", "--custom-rm-path"),
        ("trainer.frobnicate=1", "trainer.frobnicate=1: unknown key"),
    ],
)
def test_what_has_no_counterpart_is_told(override: str, named: str) -> None:
    (problem,) = from_verl(override.split()).unmapped
    assert named in problem


@pytest.mark.parametrize(
    ("estimator", "normalized"), [("grpo", False), ("rloo", False), ("reinforce_plus_plus_baseline", True)]
)
def test_one_answer_per_prompt_is_compared_with_none(estimator: str, normalized: bool) -> None:
    recipe = f"{MODEL} algorithm.adv_estimator={estimator} algorithm.norm_adv_by_std_in_grpo=False"
    done = from_verl(recipe.split())
    algorithm = parse_arguments(done.words).arguments.algorithm
    assert (algorithm.advantage_estimator, algorithm.normalize_advantages) == ("reinforce", normalized)
    assert refusals(f"{shlex.join(done.words)}\n{VERL}--use-rollout-logprobs\n", {}) == []
    assert f"algorithm.adv_estimator={estimator} is taken as --advantage-estimator reinforce" in done.not_needed[-1]
    several = from_verl(f"{recipe} {ROLLOUT}.n=2".split()).words
    assert parse_arguments(several).arguments.algorithm.advantage_estimator != "reinforce"


def test_a_warm_up_over_mini_batches_of_unequal_size_is_told() -> None:
    done = from_verl([f"{ACTOR}.ppo_mini_batch_size=100", f"{ACTOR}.optim.lr_warmup_steps=10"])
    assert "--lr-warmup-iters" not in done.words
    assert done.unmapped[1] == (
        f"{ACTOR}.optim.lr_warmup_steps=10: give --lr-warmup-iters, this times --num-steps-per-rollout and --ppo-epochs"
    )


def test_keys_of_one_reason_share_a_line() -> None:
    done = from_verl([f"{ACTOR}.strategy=fsdp", "model_engine=dp", "--config-name=x", "$@"])
    assert done.not_needed == [f"{ACTOR}.strategy=fsdp, model_engine=dp: Megatron trains"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "algorithm.adv_estimator=grpo critic.optim.lr=1e-5 trainer.critic_warmup=0 algorithm.gamma=0.9",
            "critic.optim.lr=1e-5, trainer.critic_warmup=0: no effect without algorithm.adv_estimator=gae",
        ),
        (f"{LOSS}.loss_mode=sapo {ACTOR}.clip_ratio_c=10", "clip_ratio_c=10: no effect without "),
        (f"{LOSS}.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean", "loss_agg_mode=token-mean: no effect without "),
        (f"{LOSS}.tau_pos=2", f"{LOSS}.tau_pos=2: no effect without {LOSS}.loss_mode=sapo"),
        (f"{CORRECTION}.rollout_is=token {CORRECTION}.bypass_mode=True",
         f"{CORRECTION}.rollout_is=token: no effect without {CORRECTION}.bypass_mode=False"),
        (f"{CORRECTION}.loss_type=reinforce", f"no effect without {CORRECTION}.bypass_mode=True"),
        ("algorithm.pf_ppo.weight_pow=2.0", "algorithm.use_pf_ppo switches it on"),
        ("actor_rollout_ref.model.lora.merge=True", "adapters are published merged into the weights"),
        ("+actor_rollout_ref.model.torch_dtype=bfloat16", "weights are read as bf16 on GPUs"),
        (f"{ROLLOUT}.prompt_length=512", "lengths are those of data.max_prompt_length and data.max_response_length"),
        (f"{ACTOR}.entropy_from_logits_with_chunking=True", "entropy comes in chunks"),
        (f"{ACTOR}.optim.optimizer=AdamW", "AdamW is the optimizer"),
        ("trainer.max_critic_ckpt_to_keep=2", "the critic is a part of the checkpoints"),
        ("distillation.teacher_models.a.model_path=/m", "the teacher of --use-opd is a frozen group of engines"),
        ("reward.num_workers=8", "reward.num_workers=8: --rm-workers bounds"),
        (f"{ROLLOUT}.multi_turn.format=hermes", "multi_turn.enable switches it on, whose line says the rest"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns=5", f"no effect without {ROLLOUT}.multi_turn.enable=True"),
        ("reward_model.model.path=m", "reward_model.enable switches it on, whose line says the rest"),
        (f"{TRANSFORMER}.account_for_loss_in_pipeline_split=False", "use --decoder-first-pipeline-num-layers"),
        (f"{ACTOR}.use_prefix_grouper=True", "it saves time alone"),
        (f"{MODEL_KEYS}.lora_rank=8 {MODEL_KEYS}.exclude_modules='.*visual.*'", "only layers of the language model"),
        (f"{MODEL_KEYS}.lora_rank=0 {MODEL_KEYS}.lora_alpha=0.0 {MODEL_KEYS}.exclude_modules=x",
         f"lora_alpha=0.0, {MODEL_KEYS}.exclude_modules=x: no effect without {MODEL_KEYS}.lora_rank other than 0"),
        (f"{MODEL_KEYS}.lora.rank=0 {MODEL_KEYS}.lora.target_modules=[a] {MODEL_KEYS}.lora.dropout=0.1",
         f"no effect without {MODEL_KEYS}.lora.rank other than 0"),
        ("data.return_multi_modal_inputs=False", "from the images of a row"),
        (f"{ROLLOUT}.server.timeout=60 {ROLLOUT}.sglang_rollout_mode=server", "SGLang generates"),
        ("reward.reward_manager.name=dapo", "reward.reward_manager.name=dapo: --rm-type names the reward"),
    ],
)  # fmt: skip
def test_keys_that_count_for_nothing_are_told(overrides: str, line: str) -> None:
    done = from_verl(overrides.split())
    assert line in "\n".join(done.not_needed)
    assert done.unmapped == []


@pytest.mark.parametrize("named", ["--config-path=./sub/config --config-name=mine", "-cp sub/config -cn mine.yaml"])
def test_values_of_a_configuration_file_count_before_those_of_the_command(named: str, tmp_path: Path) -> None:
    scripts, folder = tmp_path / "scripts", tmp_path / "sub" / "config"
    scripts.mkdir()
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "hydra: {searchpath: [a]}\ndefaults: [ppo_trainer]\n"
        "data: {train_files: [/d/a.parquet], train_batch_size: 256, max_response_length: 1024}\n"
        "actor_rollout_ref: {rollout: {multi_turn: {enable: true}}}\n"
    )
    done = from_verl(f"{named} data.train_batch_size=512".split(), directory=scripts)
    words = " ".join(done.words)
    for flags in ("--prompt-data /d/a.parquet", "--rollout-batch-size 512", "--rollout-max-response-len 1024"):
        assert flags in words
    (problem,) = done.unmapped
    assert problem.startswith(f"{ROLLOUT}.multi_turn.enable=True: ")


def test_a_configuration_file_on_top_of_others(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 256, max_response_length: 64, seed: 7}\n")
    (tmp_path / "my_ppo_trainer.yaml").write_text(
        "defaults: [ppo_trainer, base, gone, {actor: mine}, {override hydra/launcher: a}, _self_]\n"
        "data: {max_response_length: 32, max_prompt_length: 16}\n"
        "actor_rollout_ref: {model: {path: '${oc.env:MODEL}'}, rollout: {n: '${data.n}', temperature: '${t}'}}\n"
    )
    named = f"-cn my_ppo_trainer ~data.seed {ROLLOUT}.temperature=0.5".split()
    done = from_verl(named, directory=tmp_path)
    words = " ".join(done.words)
    for flags in ("--rollout-batch-size 256", "--rollout-max-response-len 32", "--rollout-temperature 0.5"):
        assert flags in words
    assert "$" not in words
    assert "--rollout-seed" not in words
    assert [problem.partition(":")[2][:50] for problem in done.unmapped] == [
        " gone of its defaults was not read: write its valu",
        " {'actor': 'mine'} of its defaults was not read: w",
        " write the value that it refers to",
        "MODEL}: write the value that it refers to",
    ]


def test_configuration_files_that_name_each_other_are_read_once(tmp_path: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: [{other}]\ndata: {{train_batch_size: 512}}\n")
    done = from_verl(["--config-name=one"], directory=tmp_path)
    assert "--rollout-batch-size 512" in " ".join(done.words)
    assert done.unmapped == ["two.yaml: one of its defaults was not read: write its values as key=value"]


GRPO = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=8"
MODEL = "data.train_files=a.parquet actor_rollout_ref.model.path=/m trainer.total_training_steps=50"


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.use_kl_in_reward=True algorithm.lam=0.95 critic.model.path=/m trainer.critic_warmup=10",
        f"{GRPO} {LOSS}.loss_mode=sapo {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10",
        f"{GRPO} {LOSS}.loss_mode=geo_mean {ACTOR}.clip_ratio_c=10",
        f"{GRPO} trainer.max_actor_ckpt_to_keep=2",
        f"{GRPO} {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=2 {CORRECTION}.bypass_mode=True",
        f"{GRPO} data.val_files=['$HOME/gsm8k/test.parquet','$HOME/math/test.parquet']",
    ],
)
def test_what_train_would_refuse_is_left_out(overrides: str) -> None:
    words = from_verl(f"{MODEL} {overrides}".split()).words
    assert refusals(f"{shlex.join(words)}\n{VERL}--use-rollout-logprobs\n", {}) == []


def test_ppo_whitens_and_has_a_critic() -> None:
    arguments = parse_arguments(from_verl(()).words).arguments  # gae is verl's default
    assert (arguments.algorithm.token_advantages, arguments.algorithm.normalize_advantages) == ("gae", True)
    assert (arguments.critic.critic_lr, arguments.critic.value_clip) == (1e-5, 0.5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", "--rollout-batch-size 32"),
        ("async_training.require_batches=4", "--rollout-batch-size 128"),
        ("async_training.require_batches=4", "--num-steps-per-rollout 4"),
        ("async_training.require_batches=4", "--num-rollout 400"),
        ("async_training.require_batches=$N", "--rollout-batch-size 32*$N"),
        ("", "--update-weights-interval 4"),
        ("trainer.nnodes=2", "--rollout-num-gpus 8"),
        ("rollout.test_freq=10", "--eval-interval 40"),
        ("trainer.test_freq=10", "--eval-interval 40"),  # since verl 0.8
        ("rollout.test_freq=5 trainer.test_freq=10", "--eval-interval 20"),
        ("trainer.save_freq=3 async_training.trigger_parameter_sync_step=2", "--save-interval 6"),
    ],
)
def test_the_fully_asynchronous_trainer_counts_mini_batches_and_publications(overrides: str, words: str) -> None:
    recipe = f"data.train_batch_size=0 {ACTOR}.ppo_mini_batch_size=32 rollout.total_rollout_steps=51200 {overrides}"
    assert words in " ".join(from_verl(recipe.split(), FULLY_ASYNC).words)


def test_the_end_of_the_fully_asynchronous_trainer_is_counted_in_prompts() -> None:
    recipe = ["data.train_batch_size=0", "rollout.test_freq=-1", "trainer.save_freq=0", "trainer.total_epochs=10"]
    done = from_verl([*recipe, "rollout.total_rollout_steps=51200", "rollout.n=4"], FULLY_ASYNC)
    assert done.unmapped == []
    assert "--eval-interval" not in done.words
    assert "--save-interval" not in done.words
    assert f"rollout.n=4: {ROLLOUT}.n counts" in done.not_needed
    assert any("trainer.total_epochs=10: fewer prompts than" in line for line in done.not_needed)
    (problem,) = from_verl(["rollout.total_rollout_steps=$STEPS"], FULLY_ASYNC).unmapped
    assert "`" not in problem
    assert "--num-rollout is this over ppo_mini_batch_size and require_batches" in problem


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_kl_in_rewards_that_are_compared_is_told(estimator: str) -> None:
    done = from_verl([f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=True"])
    assert "--kl-coef" not in done.words
    assert "--token-advantages" not in done.words
    (problem,) = done.unmapped
    assert f"adv_estimator={estimator}: verl takes the KL off the rewards before they are compared" in problem
    assert "give --use-kl-loss --kl-loss-coef" in problem


def test_discounted_rewards_without_a_critic_are_refused() -> None:
    words = from_verl(["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"]).words
    assert any("--gamma 0.9 has no effect" in line for line in refusals(shlex.join(words), {}))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", "--num-epoch 30"),
        ("trainer.total_epochs=15", "--num-epoch 15"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "--lr-warmup-fraction 0.1"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1 {ACTOR}.optim.lr_warmup_steps=-1", "--lr-warmup-fraction 0.1"),
        ("critic.optim.lr_warmup_steps_ratio=0.05", "--critic-lr-warmup-fraction 0.05"),
    ],
)
def test_epochs_and_shares_of_the_run_are_counted_when_it_starts(overrides: str, words: str) -> None:
    done = from_verl(overrides.split())
    assert words in " ".join(done.words)
    assert done.unmapped == []


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        ("trainer.total_epochs=15 trainer.total_training_steps=50", "--num-epoch"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1 {ACTOR}.optim.lr_warmup_steps=5", "--lr-warmup-fraction"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.0", "--lr-warmup-fraction"),
        ("algorithm.adv_estimator=grpo critic.optim.lr_warmup_steps_ratio=0.05", "--critic-lr-warmup-fraction"),
    ],
)
def test_what_other_keys_decide_is_not_said_twice(overrides: str, absent: str) -> None:
    assert absent not in from_verl(overrides.split()).words
