"""The nouns of the flow: prompt → sample → group → train batch → weights. All frozen, all plain data.

A prompt is immutable and a sample is a separate record, so "reset for retry" does not exist: a retry is
a new attempt of the same prompt with nothing to clear.
"""

from miles_async.types.batches import NOT_SHOWN as NOT_SHOWN
from miles_async.types.batches import PreparedBatch as PreparedBatch
from miles_async.types.batches import TokenScores as TokenScores
from miles_async.types.batches import TrainBatch as TrainBatch
from miles_async.types.batches import TrainShard as TrainShard
from miles_async.types.fleet import CollectedSession as CollectedSession
from miles_async.types.fleet import EngineLoad as EngineLoad
from miles_async.types.fleet import EngineStats as EngineStats
from miles_async.types.fleet import FleetMembers as FleetMembers
from miles_async.types.fleet import Incarnation as Incarnation
from miles_async.types.fleet import OpenSession as OpenSession
from miles_async.types.fleet import RolloutStats as RolloutStats
from miles_async.types.fleet import SessionEnding as SessionEnding
from miles_async.types.pictures import Picture as Picture
from miles_async.types.reports import EngineReport as EngineReport
from miles_async.types.reports import EnginesReport as EnginesReport
from miles_async.types.reports import RanksReport as RanksReport
from miles_async.types.reports import RankTimes as RankTimes
from miles_async.types.samples import HIGHEST_LOGPROB as HIGHEST_LOGPROB
from miles_async.types.samples import NO_VERSION as NO_VERSION
from miles_async.types.samples import UNISSUED as UNISSUED
from miles_async.types.samples import AssistantTurn as AssistantTurn
from miles_async.types.samples import Attempt as Attempt
from miles_async.types.samples import Branch as Branch
from miles_async.types.samples import FinishReason as FinishReason
from miles_async.types.samples import Float32 as Float32
from miles_async.types.samples import GenerateRequest as GenerateRequest
from miles_async.types.samples import Generation as Generation
from miles_async.types.samples import Group as Group
from miles_async.types.samples import Int32 as Int32
from miles_async.types.samples import Int64 as Int64
from miles_async.types.samples import JsonObject as JsonObject
from miles_async.types.samples import Label as Label
from miles_async.types.samples import Observation as Observation
from miles_async.types.samples import Prompt as Prompt
from miles_async.types.samples import Rewarded as Rewarded
from miles_async.types.samples import RewardParts as RewardParts
from miles_async.types.samples import RoutedExperts as RoutedExperts
from miles_async.types.samples import Sample as Sample
from miles_async.types.samples import TokenRewards as TokenRewards
from miles_async.types.samples import TurnSpan as TurnSpan
from miles_async.types.samples import UInt8 as UInt8
from miles_async.types.samples import columns_of as columns_of
from miles_async.types.settings import Changes as Changes
from miles_async.types.settings import KeptSetting as KeptSetting
from miles_async.types.settings import SettingValue as SettingValue
from miles_async.types.weights import CanaryScore as CanaryScore
from miles_async.types.weights import GroupBackend as GroupBackend
from miles_async.types.weights import HeldPart as HeldPart
from miles_async.types.weights import HeldWeights as HeldWeights
from miles_async.types.weights import Publication as Publication
from miles_async.types.weights import StagedWeights as StagedWeights
from miles_async.types.weights import TensorMeta as TensorMeta
from miles_async.types.weights import TensorShare as TensorShare
from miles_async.types.weights import WeightDelta as WeightDelta
