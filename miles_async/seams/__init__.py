"""Boundaries between rooms: protocols of the controller, the two sides and the engines.

A narrow protocol with a single consumer stands beside that consumer, such as ``controller.Publisher``.
``controller.py`` sees protocols only; the wiring chooses the implementations.
"""

from miles_async.seams.fleet import EngineErrors, EngineFleet, PerEngine, arguments_of, per_engine
from miles_async.seams.server import InferenceServer, TokenVersions
from miles_async.seams.sides import PromptSource, RolloutSide, SavedSide, TrainerSide
from miles_async.seams.weights import SenderHandle, WeightSender, WeightSenders, WeightTransport

__all__ = [
    "EngineErrors",
    "EngineFleet",
    "InferenceServer",
    "PerEngine",
    "PromptSource",
    "RolloutSide",
    "SavedSide",
    "SenderHandle",
    "TokenVersions",
    "TrainerSide",
    "WeightSender",
    "WeightSenders",
    "WeightTransport",
    "arguments_of",
    "per_engine",
]
