"""How fast changes of weights are encoded and applied, per second of one core's time, and what is left to be sent.

``changed``: share of the elements. Those of bfloat16 change by their last bit, as after a small optimizer step, those
of float32 by up to 12 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miles_async.arguments.weights import DeltaEncoding
from miles_async.weights.delta import apply, encode
from tests.benchmarks.digests import rate
from tests.benchmarks.report import Row

ELEMENTS = 1 << 24
ENCODINGS: tuple[DeltaEncoding, ...] = ("xor", "overwrite")
CASES = (("bfloat16", 0.0), ("bfloat16", 0.02), ("bfloat16", 0.5), ("float32", 0.02), ("float32", 1.0))


def rows() -> Iterator[Row]:
    """By dtype, share of changed elements, and encoding."""
    for dtype, changed in CASES:
        for encoding in ENCODINGS:
            yield measure(dtype, changed, encoding)


def measure(dtype: str, changed: float, encoding: DeltaEncoding) -> Row:
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(ELEMENTS).astype(np.float32).view(np.uint32)
    old = (weights >> 16).astype(np.uint16) if dtype == "bfloat16" else weights
    new = old.copy()
    places = draw.random(ELEMENTS) < changed
    new[places] ^= 1 if dtype == "bfloat16" else draw.integers(1, 1 << 12, int(places.sum())).astype(np.uint32)
    before, after = old.view(np.uint8), new.view(np.uint8)
    change = encode("w", before, after, old.itemsize, encoding)
    content = before.copy()
    return {
        "dtype": dtype,
        "changed": changed,
        "encoding": encoding,
        "encode_gb_s": rate(old.nbytes, lambda: encode("w", before, after, old.itemsize, encoding)),
        "apply_gb_s": rate(old.nbytes, lambda: apply(change, content)) if change else None,
        "sent": round(len(change.data) / old.nbytes, 3) if change else 0.0,
    }
