"""Engines and sessions: members, states and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from miles_async.types.samples import RewardParts, Sample


class Incarnation(msgspec.Struct, frozen=True, order=True):
    """An engine from one of its starts to its end. Weights are brought to incarnations: a restarted engine has none of
    what was sent before.
    """

    engine: str  # its id
    number: int  # changes when facts known about the engine become void

    def __str__(self) -> str:
        return self.engine


class FleetMembers(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that a publication concerns."""

    serving: tuple[Incarnation, ...]  # hold the current version and take requests
    joining: tuple[Incarnation, ...]  # up, but their weights are unknown until a publication reaches them
    starting: tuple[str, ...]  # ids of engines that are not up yet
    ranks: Mapping[str, int]  # process-group ranks by engine id (its tensor-parallel size)
    bucketwise: frozenset[str] = frozenset()  # ids of engines that need a call per bucket


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current load of an engine."""

    running: int  # requests that generate
    waiting: int  # queued requests, including requests put back for lack of KV cache
    kv_use: float  # part of the KV cache that running requests hold, 0 to 1


SessionEnding = Literal["open", "finished", "aborted", "expired"]
"""finished and aborted by its agent or the run; expired: it was not used."""


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session of the session server, as its agent is given it."""

    session_id: str
    instance_id: str
    url: str
    base_url: str  # for clients of chat completions


class CollectedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an agent's session."""

    ending: SessionEnding
    sample: Sample | None  # of its trajectory; None: it had no turn
    reward: float | RewardParts | None  # that its agent gave
    cut: bool  # the last request found no room, or its turn used all of it
    failure: str | None  # the engines' or network's failure in the last request
    waiting: bool  # the last request was given up, or is under way


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Engines, their requests and their router at one moment."""

    in_flight: int  # requests
    oldest_request_seconds: float
    busy_seconds: float  # in which any request was in flight
    failed_tries: int
    engines: str  # each with its state, for people
    router: Mapping[str, float]  # its own metrics, as last read
    restarts: Mapping[str, int]  # by engine


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout side at one moment."""

    balance: Mapping[str, int]  # groups issued, and how many ended or stand where (C2)
    gauges: Mapping[str, float]
    router: Mapping[str, float]  # see EngineStats
    busy_seconds: float  # of ``seconds``, those in which engines generated
    seconds: float  # since the first publication, up to the end of the loop
