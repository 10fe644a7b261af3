"""Boundaries between rooms: protocols of the controller, the two sides and the engines.

A narrow protocol with a single consumer stands next to that consumer, such as ``rollout.manager.Engines``.
``controller.py`` sees protocols only; the wiring chooses the implementations.
"""

from miles_async.seams.fleet import EngineErrors, EngineFleet, arguments_of, per_engine
from miles_async.seams.loop import (
    NO_CHANGES,
    NO_TURNS,
    Checkpoints,
    Gpus,
    LiveSettings,
    NoTurns,
    Position,
    Publisher,
    Recorder,
)
from miles_async.seams.server import InferenceServer, TokenVersions
from miles_async.seams.sides import PromptSource, Resumption, RolloutSide, SavedSide, TrainerSide
from miles_async.seams.weights import SenderHandle, WeightSender, WeightSenders, WeightTransport
