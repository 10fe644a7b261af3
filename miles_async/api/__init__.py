"""Protocols that users implement: rewards, filters, generation, environments, agents, losses, trackers, backends.

A hook is named on the command line as ``module:attr``, loaded once at the start and checked against its protocol here.
"""

from miles_async.api.algorithm import AdvantageEstimator as AdvantageEstimator
from miles_async.api.algorithm import Aggregation as Aggregation
from miles_async.api.algorithm import Correction as Correction
from miles_async.api.algorithm import KlEstimator as KlEstimator
from miles_async.api.algorithm import Need as Need
from miles_async.api.algorithm import PolicyLoss as PolicyLoss
from miles_async.api.algorithm import TokenAdvantages as TokenAdvantages
from miles_async.api.algorithm import TokenBatch as TokenBatch
from miles_async.api.rollout import Agent as Agent
from miles_async.api.rollout import EngineClient as EngineClient
from miles_async.api.rollout import Environment as Environment
from miles_async.api.rollout import Generate as Generate
from miles_async.api.rollout import GroupFilter as GroupFilter
from miles_async.api.rollout import GroupReward as GroupReward
from miles_async.api.rollout import MakeEnvironment as MakeEnvironment
from miles_async.api.rollout import Reward as Reward
from miles_async.api.sampler import EpochRows as EpochRows
from miles_async.api.sampler import PromptSampler as PromptSampler
from miles_async.api.tracker import Metrics as Metrics
from miles_async.api.tracker import Tracker as Tracker
from miles_async.api.trainer import ChangesSettings as ChangesSettings
from miles_async.api.trainer import LeavesDevice as LeavesDevice
from miles_async.api.trainer import SavesInBackground as SavesInBackground
from miles_async.api.trainer import ScoresTokens as ScoresTokens
from miles_async.api.trainer import TimesParts as TimesParts
from miles_async.api.trainer import TrainBackend as TrainBackend
