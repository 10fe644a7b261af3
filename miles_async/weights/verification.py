"""Verification of an update: which engines do not hold the staged weights (``--verify-weights``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.types import CanaryScore, HeldWeights, Incarnation, StagedWeights, TensorShare
from miles_async.weights.verify import EVERYTHING, SHOWN, Comparison, compare_digests, judge_canary

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Findings:
    """Findings of one update, beside the engines that failed."""

    canary_difference: float = 0.0  # largest over engines
    canary_undecided: list[Incarnation] = field(default_factory=list)
    compared_tensors: list[int] = field(default_factory=list)  # one entry per engine that passed
    incomparable_tensors: list[int] = field(default_factory=list)


class Verification:
    """Compares reports of engines with the staged weights."""

    def __init__(self, arguments: WeightsArguments, tolerance: float) -> None:
        """``tolerance``: for the mean difference of the canary's log-probs."""
        self._arguments = arguments
        self._tolerance = tolerance
        self._told: set[tuple[str, ...]] = set()  # lists of tensors that can't be compared, which were logged

    def share(self, version: int) -> TensorShare:
        """The tensors of which engines that serve already report digests."""
        if self._arguments.verify_weights == "full":
            return EVERYTHING
        shares = self._arguments.verify_weights_shares
        return TensorShare(version % shares, shares)

    async def compare_digests(
        self, staged: StagedWeights, held: Mapping[Incarnation, HeldWeights], share: TensorShare, findings: Findings
    ) -> dict[Incarnation, str]:
        """Describe, per engine, how its weights differ from the staged ones. A report that engines share is compared
        once.
        """
        problems: dict[Incarnation, str] = {}
        compared: dict[int, Comparison] = {}  # by the identity of a report
        skip = self._arguments.verify_weights_skip
        for engine, weights in held.items():
            if id(weights) not in compared:
                compared[id(weights)] = await asyncio.to_thread(
                    compare_digests, staged, weights, share=share, skip=skip
                )
            found = compared[id(weights)]
            if found.problem:
                problems[engine] = found.problem
                continue
            findings.compared_tensors.append(found.compared)
            findings.incomparable_tensors.append(len(found.incomparable))
            self._tell_incomparable(engine, found.incomparable)
        return problems

    def judge_scores(
        self, staged: StagedWeights, scores: Mapping[Incarnation, CanaryScore], findings: Findings
    ) -> dict[Incarnation, str]:
        """Describe, per engine, how its canary disagrees."""
        problems: dict[Incarnation, str] = {}
        for engine, score in scores.items():
            verdict = judge_canary(staged, score, self._tolerance)
            if verdict.problem:
                problems[engine] = verdict.problem
                continue
            findings.canary_difference = max(findings.canary_difference, verdict.difference)
            if staged.previous_canary_logprobs and not verdict.tells_versions_apart:
                findings.canary_undecided.append(engine)
        if findings.canary_undecided and self._arguments.verify_weights == "canary":
            log.warning(
                "the canary could not distinguish this version from the one before: an engine that kept the old "
                "weights would pass, too (--verify-weights full or sample compares all elements)",
                version=staged.version,
                engines=len(findings.canary_undecided),
            )
        return problems

    def _tell_incomparable(self, engine: Incarnation, names: tuple[str, ...]) -> None:
        """Log each list once: it is the same at every publication."""
        if names and names not in self._told:
            self._told.add(names)
            log.warning(
                "tensors that can't be compared: skipped, or the engine keeps them in another form (quantized, "
                "reordered for a kernel); only the canary says something about them",
                engine=str(engine),
                tensors=len(names),
                first=names[:SHOWN],
            )
