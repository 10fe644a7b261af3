"""Does an engine hold the weights that the trainer sent (``--verify-weights``)?

Digests compare every element that it holds with the staged weights. The canary compares its outputs: its log-probs of
one text with the trainer's, for the new version and for the one before.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog

from miles_async.arguments.cluster import Device
from miles_async.arguments.weights import WeightsArguments
from miles_async.runtime.tensor_digest import total
from miles_async.seams import EngineFleet, InferenceServer
from miles_async.types import (
    CanaryScore,
    Float32,
    HeldPart,
    HeldWeights,
    Incarnation,
    StagedWeights,
    TensorMeta,
    TensorShare,
)

log = structlog.get_logger(__name__)

QUANTILE = 0.9  # of the differences: a few tokens may differ by anything
QUANTILE_TOLERANCE = 4.0  # limit for this quantile, in tolerances; in a normal distribution it is 2 means
DECIDED = 6.0  # of _how_much_nearer(): noise of any distribution reaches it once in 60 million times

SHOWN = 3  # names in a message
EVERYTHING = TensorShare()


def canary_tokens(prompts: Iterable[Sequence[int]], vocab_size: int, *, length: int) -> tuple[int, ...]:
    """Join ``prompts`` up to ``length`` tokens; random tokens if they have less than two."""
    tokens: list[int] = []
    for prompt in prompts:
        tokens += prompt
        if len(tokens) >= length:
            break
    if len(tokens) < 2:
        draw = random.Random(0)
        tokens = [draw.randrange(vocab_size) for _ in range(length)]
    return tuple(tokens[:length])


def canary_tolerance(arguments: WeightsArguments, *, bf16: bool, device: Device) -> float:
    """``--canary-tolerance``, or the mean log-prob difference between correct implementations of a model, and a margin.

    In bf16, an error of 2 % in hidden states makes a mean of 0.11 if logits have a standard deviation of 6. Wrong
    weights make several units with a large vocabulary. On CUDA Transformer Engine multiplies fp32 in TF32, which has
    three bits more than bf16. Elements in float8 are off by 2.6 % (root mean square), and so is each product with
    others: two such errors per matrix add up to three times those of bf16 in hidden states.
    """
    if arguments.canary_tolerance is not None:
        return arguments.canary_tolerance
    if arguments.rollout_quantization == "fp8":
        return 0.75
    if bf16:
        return 0.25
    return 0.25 / 8 if device == "cuda" else 1e-3


@dataclass(slots=True)
class Findings:
    """Findings of one update, apart from failures."""

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
        """The share of tensors whose digests serving engines report."""
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
        """Describe, per engine, how its canary differs."""
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
                "reordered for a kernel); only the canary covers them",
                engine=str(engine),
                tensors=len(names),
                first=names[:SHOWN],
            )


async def read_held_weights(
    fleet: EngineFleet, engines: Sequence[Incarnation], share: TensorShare
) -> Mapping[Incarnation, HeldWeights | Exception]:
    """Ask what each engine holds while it is paused, with digests of a share of it.

    Engines whose reports have the same fingerprint share the object: the first that answers is read.
    """
    found = await fleet.call(engines, InferenceServer.report_weights, share)
    results: dict[Incarnation, HeldWeights | Exception] = {}
    alike: defaultdict[str, list[Incarnation]] = defaultdict(list)
    for engine, report in found.items():
        if isinstance(report, Exception):
            results[engine] = report
        else:
            alike[report].append(engine)
    for report, reporters in alike.items():  # one, unless something is wrong
        for number, engine in enumerate(reporters):
            held = (await fleet.call([engine], InferenceServer.held_weights, report))[engine]
            results[engine] = held
            if not isinstance(held, Exception):
                results |= dict.fromkeys(reporters[number:], held)
                break
    return results


# ---------------------------------------------------------------------------------------------- the canary
@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """Verdict on an engine's weights by its log-probs of the canary."""

    problem: str | None  # why the log-probs cannot come from the staged weights
    difference: float  # mean of |engine - trainer|
    tells_versions_apart: bool  # else the previous version's weights would pass, too


def judge_canary(staged: StagedWeights, score: CanaryScore, tolerance: float) -> CanaryVerdict:
    """Compare ``score`` with the trainer's log-probs. ``tolerance``: for the mean difference."""
    found, expected = np.array(score.logprobs), np.array(staged.canary_logprobs)
    if score.weight_version != str(staged.version):
        return _fails(f"reports weight version {score.weight_version!r}, expected {staged.version}")
    if found.shape != expected.shape or not np.isfinite(found).all():
        return _fails(f"expected {expected.size} finite log-probs of the canary, found {score.logprobs}")
    differences = np.abs(found - expected)
    mean, high = float(differences.mean()), _quantile(differences, QUANTILE)
    if mean > tolerance or high > QUANTILE_TOLERANCE * tolerance:
        return _fails(
            f"canary log-probs differ by {mean:.3g} on average and by {high:.3g} at the {QUANTILE:.0%} quantile, "
            f"tolerances {tolerance:g} and {QUANTILE_TOLERANCE * tolerance:g} (--canary-tolerance)",
            mean,
        )
    if len(staged.previous_canary_logprobs) != expected.size:
        return CanaryVerdict(None, mean, tells_versions_apart=False)
    nearer = _how_much_nearer(found, expected, np.array(staged.previous_canary_logprobs))
    if nearer < -DECIDED:
        return _fails(
            f"canary log-probs are nearer to the version before than to version {staged.version}: by {-nearer:.1f} "
            f"standard deviations of chance, limit {DECIDED:g}",
            mean,
        )
    return CanaryVerdict(None, mean, tells_versions_apart=nearer > DECIDED)


def _quantile(values: npt.NDArray[np.float64], share: float) -> float:
    """Like ``np.quantile`` in a tenth of the time; called for every engine at every publication."""
    return float(np.interp(share * (len(values) - 1), np.arange(len(values)), np.sort(values)))


def _how_much_nearer(found: Float32, new: Float32, old: Float32) -> float:
    """At how many more tokens ``found`` is nearer to ``new`` than to ``old``, in standard deviations of chance.

    All three are noisy: the trainer, too, rounds differently at each version. Where versions differ by less
    than that, chance decides for each token; the sum is beyond ``k`` with a probability below exp(-k²/2) (Hoeffding).
    """
    nearer = np.sign(np.abs(found - old) - np.abs(found - new))
    return float(nearer.sum()) / math.sqrt(max(1, int(np.count_nonzero(nearer))))


def _fails(problem: str, difference: float = math.inf) -> CanaryVerdict:
    return CanaryVerdict(problem, difference, tells_versions_apart=False)


# ------------------------------------------------------------------------------------------------- digests
@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing an engine's weights with the staged ones."""

    problem: str | None  # what differs
    compared: int  # tensors whose elements were compared
    incomparable: tuple[str, ...]  # tensors that can't be compared, or were skipped


def compare_digests(
    staged: StagedWeights, held: HeldWeights, *, share: TensorShare = EVERYTHING, skip: Sequence[str] = ()
) -> Comparison:
    """Compare in both directions: all that was staged is held, element by element, and nothing else is.

    ``share``: the tensors whose digests ``held`` has; of the others it only lists which parts are held. ``skip``: parts
    of names of tensors, or of the engine's parameters, that are not compared (``--verify-weights-skip``).
    """

    def is_skipped(name: str) -> bool:
        return any(part in name for part in skip)

    metas = {meta.name: meta for bucket in staged.buckets.values() for meta in bucket}
    incomparable = tuple(name for name in metas if name in held.other_form or is_skipped(name))
    comparable = [meta for name, meta in metas.items() if name not in set(incomparable)]
    wrong = [
        f"{name} {what}"
        for name, what in (
            *((meta.name, _wrong(meta, held.parts.get(meta.name, ()), share)) for meta in comparable),
            *_not_sent(metas, held),
        )
        if what and not is_skipped(name)
    ]
    compared = sum(share.includes(meta.name) for meta in comparable)
    if not wrong:
        return Comparison(None, compared, incomparable)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Comparison(
        f"weights differ: {wrong[0]}{more}. Tensors that an engine casts, computes with or fills by itself as it loads "
        "can't be compared: --verify-weights-skip, or --verify-weights canary",
        compared,
        incomparable,
    )


def _not_sent(sent: Iterable[str], held: HeldWeights) -> Iterator[tuple[str, str]]:
    names = set(sent)
    for name, parts in held.parts.items():
        if name not in names and (parts or name in held.other_form):
            yield name, "is held and was not sent"
    for name, elements in held.unfilled.items():
        yield name, f"is a parameter of the engine's model with {elements} elements other than 0 that no tensor filled"


def _wrong(meta: TensorMeta, parts: Sequence[HeldPart], share: TensorShare) -> str | None:
    """Describe the faults of the held ``parts`` of a tensor; copies on several ranks must be equal."""
    if casts := {part.dtype for part in parts} - {meta.dtype}:
        return f"was sent as {meta.dtype} and is held as {', '.join(sorted(casts))}"
    digests: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[str]] = {}
    for part in parts:
        digests.setdefault((part.offset, part.shape, part.strides), set()).add(part.digest)
    elements = sum(math.prod(shape) for _, shape, _ in digests)
    if elements != math.prod(meta.shape):
        return f"has {math.prod(meta.shape)} elements, of which {elements} are held"
    if not share.includes(meta.name):
        return None
    if any(len(alike) > 1 for alike in digests.values()):
        return "is not the same on all ranks that hold it"
    if total(digest for [digest] in digests.values()) != meta.digest:
        return "has other elements than were sent"
    return None
