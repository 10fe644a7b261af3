"""Branches of a sample, from the turns of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles_async.trajectory.context import Turn, path_to
from miles_async.trajectory.turn import with_last_token
from miles_async.types import NO_VERSION, Branch, Float32, Generation, Int32, RoutedExperts, TurnSpan, UInt8

_Piece = tuple[Int32, UInt8, Float32, Int32, Float32]
"""Tokens, loss mask, log-probs, weight versions and rewards of a part of a branch."""


def make_branch(leaf: Turn, counted: set[Turn], rewards: Mapping[Turn, float]) -> tuple[Branch, list[TurnSpan]]:
    """Build a branch; return it with the places of its turns. ``counted``: turns that carry loss in other branches."""
    path = path_to(leaf)
    pieces, spans = list[_Piece](), list[TurnSpan]()
    for turn, following in zip(path, [*path[1:], None], strict=True):
        sampled, start = turn.sampled, turn.context.length
        kept = len(sampled.output_ids) if following is None else following.context.kept
        pieces.append(_without_loss(turn.context.appended))
        if turn in counted:
            pieces.append(_without_loss(sampled.output_ids[:kept]))
        else:
            pieces.append(_with_loss(sampled, kept, rewards.get(turn, 0.0)))
        times = sampled.started_at, sampled.finished_at
        spans.append(TurnSpan(start, start + kept, turn in counted, sampled.constrained, *times))
    tokens, loss_mask, logprobs, versions, token_rewards = map(np.concatenate, zip(*pieces, strict=True))
    branch = Branch(
        tokens=tokens,
        prompt_length=leaf.context.prompt_length,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        weight_versions=versions,
        routed_experts=with_last_token(_experts(path)),
        token_rewards=token_rewards if rewards else None,
        pictures=leaf.context.pictures,
    )
    return branch, spans


def _without_loss(tokens: Int32) -> _Piece:
    """Tokens that no engine sampled, or that carry loss in another branch."""
    count = len(tokens)
    zeros = np.zeros(count, np.float32)
    return tokens, np.zeros(count, np.uint8), zeros, np.full(count, NO_VERSION, np.int32), zeros


def _with_loss(sampled: Generation, count: int, reward: float) -> _Piece:
    """The first ``count`` tokens of a turn. ``reward``: at the last of them that carries loss."""
    logprobs, versions = sampled.logprobs[:count], sampled.weight_versions[:count]
    chosen = np.ones(count, np.bool_)
    if sampled.constrained:
        chosen = ~(logprobs >= 0)  # the only token that a grammar allows was not chosen; the guard handles NaN
        chosen |= not chosen.any()  # but every turn has an age
        versions = np.where(chosen, versions, NO_VERSION).astype(np.int32)
    rewards = np.zeros(count, np.float32)
    rewards[np.flatnonzero(chosen)[-1:]] = reward
    return sampled.output_ids[:count], chosen.astype(np.uint8), logprobs, versions, rewards


def _experts(path: Sequence[Turn]) -> RoutedExperts | None:
    """Experts of all tokens of a path but the last; None unless every turn has them."""
    pieces: list[RoutedExperts] = []
    for turn, following in zip(path, [*path[1:], None], strict=True):
        if (experts := turn.sampled.routed_experts) is None:
            return None
        pieces.append(experts if following is None else experts[: following.context.routed - turn.context.routed])
    return np.concatenate(pieces)
