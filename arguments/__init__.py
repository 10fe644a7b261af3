"""Flags: one argparse group = one file = one frozen dataclass = one section of ``--help``.

Parts of the system get their own group; only ``train.py`` sees the whole :class:`Arguments`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arguments.algorithm import AlgorithmArguments
from arguments.checkpoint import CheckpointArguments
from arguments.cluster import ClusterArguments
from arguments.data import DataArguments
from arguments.engines import EnginesArguments
from arguments.evaluation import EvaluationArguments
from arguments.model import ModelArguments
from arguments.observability import ObservabilityArguments
from arguments.optimizer import OptimizerArguments
from arguments.rewards import RewardArguments
from arguments.rollout import RolloutArguments
from arguments.sessions import SessionsArguments
from arguments.staleness import StalenessArguments
from arguments.weights import WeightsArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Everything a run is told, in the order of ``--help``."""

    cluster: ClusterArguments = field(default_factory=ClusterArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    rollout: RolloutArguments = field(default_factory=RolloutArguments)
    sessions: SessionsArguments = field(default_factory=SessionsArguments)
    rewards: RewardArguments = field(default_factory=RewardArguments)
    staleness: StalenessArguments = field(default_factory=StalenessArguments)
    algorithm: AlgorithmArguments = field(default_factory=AlgorithmArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    weights: WeightsArguments = field(default_factory=WeightsArguments)
    engines: EnginesArguments = field(default_factory=EnginesArguments)
    checkpoint: CheckpointArguments = field(default_factory=CheckpointArguments)
    evaluation: EvaluationArguments = field(default_factory=EvaluationArguments)
    observability: ObservabilityArguments = field(default_factory=ObservabilityArguments)

    @property
    def data_parallel_size(self) -> int:
        """Trainer ranks that hold the same weights and train on different samples."""
        ranks_per_replica = self.model.tensor_model_parallel_size * self.model.pipeline_model_parallel_size
        return self.cluster.trainer_world_size // ranks_per_replica

    @property
    def layout(self) -> dict[str, int]:
        """How the trainer's ranks share the model, by the usual names."""
        model = self.model
        return {
            "DP": self.data_parallel_size,
            "TP": model.tensor_model_parallel_size,
            "PP": model.pipeline_model_parallel_size,
            "EP": model.expert_model_parallel_size,
        }

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, in force: ``--global-batch-size`` or the whole rollout batch."""
        return self.optimizer.global_batch_size or self.rollout.samples_per_rollout


__all__ = [
    "AlgorithmArguments",
    "Arguments",
    "CheckpointArguments",
    "ClusterArguments",
    "DataArguments",
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
