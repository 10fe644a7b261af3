"""How fast changes of weights are encoded and applied, per second of one core's time, and what is left to be sent.

Weights are normal with a standard deviation of 0.02. In each step every weight of float32 moves by a normal number with
standard deviation ``step``, about the learning rate with Adam; bfloat16 is what they round to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from miles_async.arguments.weights import DeltaEncoding
from miles_async.weights.delta import apply, encode
from tests.benchmarks.digests import rate
from tests.benchmarks.report import Row

ELEMENTS = 1 << 24
ENCODINGS: tuple[DeltaEncoding, ...] = ("xor", "overwrite")
CASES = (
    ("bfloat16", 0.0),
    ("bfloat16", 1e-6),
    ("bfloat16", 1e-5),
    ("bfloat16", 1e-4),
    ("float32", 1e-6),
    ("float32", 1e-4),
)


def rows() -> Iterator[Row]:
    """By dtype, size of the step, and encoding."""
    for dtype, step in CASES:
        for encoding in ENCODINGS:
            yield measure(dtype, step, encoding)


def measure(dtype: str, step: float, encoding: DeltaEncoding) -> Row:
    draw = np.random.default_rng(0)
    weights = 0.02 * draw.standard_normal(ELEMENTS, np.float32)
    moved = weights + np.float32(step) * draw.standard_normal(ELEMENTS, np.float32)
    old, new = (bits(values, dtype) for values in (weights, moved))
    before, after = old.view(np.uint8), new.view(np.uint8)
    change = encode("w", before, after, old.itemsize, encoding)
    content = before.copy()
    return {
        "dtype": dtype,
        "step": step,
        "changed": round(float(np.mean(old != new)), 3),
        "encoding": encoding,
        "encode_gb_s": rate(old.nbytes, lambda: encode("w", before, after, old.itemsize, encoding)),
        "apply_gb_s": rate(old.nbytes, lambda: apply(change, content)) if change else None,
        "sent": round(len(change.data) / old.nbytes, 3) if change else 0.0,
    }


def bits(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """The bits of each element; bfloat16 rounds to the nearest, ties to even."""
    words = values.view(np.uint32)
    if dtype == "float32":
        return words
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
