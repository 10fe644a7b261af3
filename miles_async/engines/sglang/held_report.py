"""Reports of the weights that a server holds: written by each of its ranks, read by the run.

A report has a line for each tensor, and engines that are alike write the same. So a run asks every engine for the
fingerprint of its report, and reads one of the reports that share it.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterable, Sequence

import msgspec

from miles_async.types import HeldPart, HeldWeights

FINGERPRINT_ACTION = "held_weights_fingerprint"  # of /weights_checker, followed by a TensorShare: makes a report
REPORT_ACTION = "held_weights"  # of /weights_checker: the report that was made last

_DIGEST_BYTES = 16


def write_report(held: HeldWeights) -> str:
    """Encode what a rank holds; the same text for the same contents, in whatever order they were loaded."""
    return msgspec.json.encode(held, order="deterministic").decode()


def read_reports(reports: Sequence[str]) -> HeldWeights:
    """Join the reports of all ranks of an engine. Raises msgspec.DecodeError."""
    ranks = [msgspec.json.decode(report, type=HeldWeights) for report in reports]
    parts: dict[str, tuple[HeldPart, ...]] = {}
    for rank in ranks:
        for name, some in rank.parts.items():
            parts[name] = (*parts.get(name, ()), *some)
    return HeldWeights(
        parts=parts,
        other_form=tuple(dict.fromkeys(name for rank in ranks for name in rank.other_form)),
        unfilled=ChainMap(*(dict(rank.unfilled) for rank in ranks)),
    )


def fingerprint(report: str) -> str:
    return hashlib.blake2b(report.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def join_fingerprints(ranks: Iterable[str]) -> str:
    """Fingerprint of an engine from the fingerprints of its ranks, in order."""
    return " ".join(ranks)
