"""Flags: one argparse group = one file = one frozen dataclass = one section of ``--help``.

Parts of the system get their own group; only ``wiring/`` and the commands about a run's flags see the whole
:class:`Arguments`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.data import DataArguments
from miles_async.arguments.debug import DebugArguments, Sides
from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.arguments.rewards import RewardArguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.sessions import SessionsArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.arguments.weights import WeightsArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """All settings of a run, in the order of ``--help``."""

    cluster: ClusterArguments = field(default_factory=ClusterArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    rollout: RolloutArguments = field(default_factory=RolloutArguments)
    sessions: SessionsArguments = field(default_factory=SessionsArguments)
    rewards: RewardArguments = field(default_factory=RewardArguments)
    staleness: StalenessArguments = field(default_factory=StalenessArguments)
    algorithm: AlgorithmArguments = field(default_factory=AlgorithmArguments)
    critic: CriticArguments = field(default_factory=CriticArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    weights: WeightsArguments = field(default_factory=WeightsArguments)
    engines: EnginesArguments = field(default_factory=EnginesArguments)
    checkpoint: CheckpointArguments = field(default_factory=CheckpointArguments)
    evaluation: EvaluationArguments = field(default_factory=EvaluationArguments)
    observability: ObservabilityArguments = field(default_factory=ObservabilityArguments)
    debug: DebugArguments = field(default_factory=DebugArguments)

    @property
    def data_parallel_size(self) -> int:
        """Trainer ranks that hold the same weights and train on different samples."""
        return self.cluster.trainer_world_size // self.model.ranks_per_replica

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch: ``--max-tokens-per-gpu`` on each of the context-parallel ranks that share it."""
        return self.optimizer.max_tokens_per_gpu * self.model.context_parallel_size

    @property
    def most_tokens_per_rank(self) -> int:
        """Tokens of the largest micro-batch on one rank, as far as flags say: a longer sample gets its own."""
        packed = self.optimizer.max_tokens_per_gpu
        if self.algorithm.supervised or self.sessions.is_multi_turn:  # longer examples are skipped, trajectories end
            return packed
        return max(packed, -(-self.longest_sample // self.model.context_parallel_size))

    @property
    def sides(self) -> Sides:
        """Sides that run."""
        if self.evaluation.eval_only:
            return "rollout"
        return "trainer" if self.algorithm.supervised else self.debug.sides

    @property
    def has_reward(self) -> bool:
        """True if flags name a reward, or something that may give one."""
        return self.rewards.named is not None or self.sessions.may_reward

    @property
    def longest_sample(self) -> int:
        """Tokens that a prompt and its response may have, as far as flags say."""
        return self.rollout.rollout_max_response_len + (self.data.rollout_max_prompt_len or 1)

    @property
    def model_directories(self) -> dict[str, Path]:
        """Flag → directory, of each model that trainer ranks load."""
        directories = {
            "--hf-checkpoint": self.model.hf_checkpoint,
            "--ref-hf-checkpoint": self.algorithm.ref_hf_checkpoint,
            "--critic-hf-checkpoint": self.critic.critic_hf_checkpoint,
        }
        return {flag: path for flag, path in directories.items() if path is not None}

    @property
    def trajectory_origins(self) -> dict[str, str]:
        """Flag → value, of each that says how trajectories are made; ``--mcp-server`` only adds tools."""
        sessions = self.sessions
        origins = {
            "--custom-generate-function-path": self.rollout.custom_generate_function_path,
            "--environment": sessions.environment,
            "--environment-path": sessions.environment_path,
            "--agent-path": sessions.agent_path,
            "--agent-command": sessions.agent_command,
        }
        return {flag: origin for flag, origin in origins.items() if origin is not None}

    @property
    def layout(self) -> dict[str, int]:
        """Layout of the trainer's ranks, by the usual names."""
        model = self.model
        return {
            "DP": self.data_parallel_size,
            "TP": model.tensor_model_parallel_size,
            "PP": model.pipeline_model_parallel_size,
            "CP": model.context_parallel_size,
            "EP": model.expert_model_parallel_size,
        }

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, in force."""
        share = self.rollout.samples_per_rollout // (self.optimizer.num_steps_per_rollout or 1)
        return self.optimizer.global_batch_size or max(1, share)

    @property
    def optimizer_steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over a rollout batch."""
        return self.rollout.samples_per_rollout // self.global_batch_size

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps on each rollout batch."""
        return self.optimizer_steps_per_epoch * self.optimizer.ppo_epochs

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.rollout.num_rollout * self.optimizer_steps_per_rollout


__all__ = [
    "AlgorithmArguments",
    "Arguments",
    "CheckpointArguments",
    "ClusterArguments",
    "CriticArguments",
    "DataArguments",
    "DebugArguments",
    "EnginesArguments",
    "EvaluationArguments",
    "ModelArguments",
    "ObservabilityArguments",
    "OptimizerArguments",
    "RewardArguments",
    "RolloutArguments",
    "SessionsArguments",
    "StalenessArguments",
    "WeightsArguments",
]
