"""Defaults of verl (0.8) that decide what is trained, for recipes that leave their keys out."""

from __future__ import annotations

DEFAULTS = {
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.rollout.n": "1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.5",
    "actor_rollout_ref.actor.optim.weight_decay": "0.01",
    "actor_rollout_ref.actor.optim.betas": "[0.9,0.999]",
    "algorithm.adv_estimator": "gae",
    "critic.optim.lr": "1e-5",
    "critic.cliprange_value": "0.5",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": "0.1",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.total_epochs": "30",
}
"""verl's defaults (trainer/config/ppo_megatron_trainer.yaml) that differ from ours."""

FULLY_ASYNC_DEFAULTS = {
    "rollout.nnodes": "1",
    "rollout.n_gpus_per_node": "8",
    "rollout.total_rollout_steps": "100",
    "async_training.trigger_parameter_sync_step": "4",
    "async_training.require_batches": "1",
}
"""Further defaults, of its fully asynchronous trainer."""
