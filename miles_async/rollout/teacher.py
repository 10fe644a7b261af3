"""The teacher of on-policy distillation: adds its log-probs of the sampled tokens to the sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from miles_async.errors import ServiceUnavailableError
from miles_async.rollout.generate import LOWEST_LOGPROB
from miles_async.runtime.services import Circuit
from miles_async.types import Branch, Float32, Sample

Score = Callable[[Sequence[int], int], Awaitable[Float32]]
"""(tokens, first) → log-probs of tokens[first:]. See ``engines.scoring.EngineScorer``."""

AnyBranch = TypeVar("AnyBranch", bound=Branch)


@dataclass(frozen=True, slots=True)
class Teacher:
    """Adds ``teacher_logprobs`` to every branch of a sample. It fails like a reward, and is asked again while it is
    down.
    """

    score: Score
    circuit: Circuit  # of the engines that score

    async def __call__(self, sample: Sample) -> Sample:
        """Raises what ``Circuit.call`` raises, and RequestRejectedError for a sample that the teacher cannot score."""
        more = [await self._taught(branch) for branch in sample.more_branches]
        return msgspec.structs.replace(await self._taught(sample), more_branches=tuple(more))

    async def _taught(self, branch: AnyBranch) -> AnyBranch:
        first = max(1, int(np.argmax(branch.loss_mask != 0)))  # nothing precedes token 0: no model predicts it
        logprobs = np.zeros(len(branch.tokens), np.float32)
        found = await self.circuit.call(partial(self._scored, branch.tokens.tolist(), first))
        logprobs[first:] = np.where(branch.loss_mask[first:] != 0, found, 0.0)
        return msgspec.structs.replace(branch, teacher_logprobs=logprobs)

    async def _scored(self, tokens: Sequence[int], first: int) -> Float32:
        found = await self.score(tokens, first)
        if not (found >= LOWEST_LOGPROB).all():  # nor is NaN
            raise ServiceUnavailableError(
                f"the teacher: expected log-probs of at least {LOWEST_LOGPROB:g}, found {found.min():g}: its numerics "
                "are broken"
            )
        return found
