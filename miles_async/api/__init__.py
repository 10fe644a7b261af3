"""Protocols that users implement: rewards, filters, generation, environments, agents, losses, trackers, backends.

A hook is named on the command line as ``module:attr``, loaded once at the start and checked against its protocol here.
"""

from miles_async.api.algorithm import (
    AdvantageEstimator,
    Aggregation,
    Correction,
    KlEstimator,
    Need,
    PolicyLoss,
    TokenAdvantages,
    TokenBatch,
)
from miles_async.api.rollout import (
    Agent,
    EngineClient,
    Environment,
    Generate,
    GroupFilter,
    GroupReward,
    MakeEnvironment,
    Reward,
)
from miles_async.api.sampler import EpochRows, PromptSampler
from miles_async.api.tracker import (
    Metrics,
    Tracker,
)
from miles_async.api.trainer import (
    ChangesSettings,
    LeavesDevice,
    SavesInBackground,
    ScoresTokens,
    TimesParts,
    TrainBackend,
)

__all__ = [
    "AdvantageEstimator",
    "Agent",
    "Aggregation",
    "ChangesSettings",
    "Correction",
    "EngineClient",
    "Environment",
    "EpochRows",
    "Generate",
    "GroupFilter",
    "GroupReward",
    "KlEstimator",
    "LeavesDevice",
    "MakeEnvironment",
    "Metrics",
    "Need",
    "PolicyLoss",
    "PromptSampler",
    "Reward",
    "SavesInBackground",
    "ScoresTokens",
    "TimesParts",
    "TokenAdvantages",
    "TokenBatch",
    "Tracker",
    "TrainBackend",
]
