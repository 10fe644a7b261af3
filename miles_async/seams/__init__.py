"""Boundaries between rooms: protocols of the controller, the two sides and the engines.

A narrow protocol with a single consumer stands next to that consumer, such as ``rollout.manager.Engines``.
``controller.py`` sees protocols only; the wiring chooses the implementations.
"""

from miles_async.seams.fleet import EngineErrors as EngineErrors
from miles_async.seams.fleet import EngineFleet as EngineFleet
from miles_async.seams.fleet import PerEngine as PerEngine
from miles_async.seams.fleet import arguments_of as arguments_of
from miles_async.seams.fleet import per_engine as per_engine
from miles_async.seams.loop import NO_CHANGES as NO_CHANGES
from miles_async.seams.loop import NO_TURNS as NO_TURNS
from miles_async.seams.loop import Checkpoints as Checkpoints
from miles_async.seams.loop import Gpus as Gpus
from miles_async.seams.loop import LiveSettings as LiveSettings
from miles_async.seams.loop import NoTurns as NoTurns
from miles_async.seams.loop import Position as Position
from miles_async.seams.loop import Publisher as Publisher
from miles_async.seams.loop import Recorder as Recorder
from miles_async.seams.server import InferenceServer as InferenceServer
from miles_async.seams.server import TokenVersions as TokenVersions
from miles_async.seams.sides import PromptSource as PromptSource
from miles_async.seams.sides import Resumption as Resumption
from miles_async.seams.sides import RolloutSide as RolloutSide
from miles_async.seams.sides import SavedSide as SavedSide
from miles_async.seams.sides import TrainerSide as TrainerSide
from miles_async.seams.weights import SenderHandle as SenderHandle
from miles_async.seams.weights import WeightSender as WeightSender
from miles_async.seams.weights import WeightSenders as WeightSenders
from miles_async.seams.weights import WeightTransport as WeightTransport
