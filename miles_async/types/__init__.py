"""The nouns of the flow: prompt → sample → group → train batch → weights. All frozen, all plain data.

A prompt is immutable and a sample is a separate record, so "reset for retry" does not exist: a retry is
a new attempt of the same prompt with nothing to clear.
"""

from miles_async.types.batches import (
    NOT_SHOWN,
    PreparedBatch,
    TokenScores,
    TrainBatch,
    TrainShard,
)
from miles_async.types.fleet import (
    CollectedSession,
    EngineLoad,
    EngineStats,
    FleetMembers,
    Incarnation,
    OpenSession,
    RolloutStats,
    SessionEnding,
)
from miles_async.types.pictures import Picture
from miles_async.types.reports import EngineReport, EnginesReport, RanksReport, RankTimes
from miles_async.types.samples import (
    HIGHEST_LOGPROB,
    NO_VERSION,
    UNISSUED,
    AssistantTurn,
    Attempt,
    Branch,
    FinishReason,
    Float32,
    GenerateRequest,
    Generation,
    Group,
    Int32,
    Int64,
    JsonObject,
    Label,
    Observation,
    Prompt,
    Rewarded,
    RewardParts,
    RoutedExperts,
    Sample,
    TokenRewards,
    TurnSpan,
    UInt8,
    columns_of,
)
from miles_async.types.settings import Changes, KeptSetting, SettingValue
from miles_async.types.weights import (
    CanaryScore,
    GroupBackend,
    HeldPart,
    HeldWeights,
    Publication,
    StagedWeights,
    TensorMeta,
    TensorShare,
    WeightDelta,
)
