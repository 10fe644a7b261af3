"""The reader of names that contracts with the packages for GPUs are checked by (tests/gpu_contract/imports.py)."""

from __future__ import annotations

import ast

import pytest

from tests.gpu_contract.imports import problem, uses


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import msgspec.json\nmsgspec.json.encode(1)", None),
        ("import msgspec as m\nm.json.encode(1, enc_hook=str)", None),
        ("from msgspec import json as j\ndef f(*rest):\n    j.decode(*rest)", None),
        ("from msgspec import json\nfound = json.encoding", "has no attribute|No module named"),
        ("from msgspec import encoding", "has no attribute|No module named"),
        ("def f():\n    import msgspec.encodings", "No module named"),
        ("import msgspec\nmsgspec.json.encode(1, order=None, hook=str)", "unexpected keyword argument 'hook'"),
        ("from torch.nn import Linear\nLinear(1)", "missing a required argument: 'out_features'"),
        ("from torch.nn import Linear\nLinear(1, 2).weights", None),  # of an object: not seen
        ("import json\njson.absent", None),  # not of another package
    ],
)
def test_names_that_are_absent_or_called_otherwise_are_found(source: str, why: str | None) -> None:
    problems = {problem(names, call) for _, names, call in uses(ast.parse(source))} - {None}
    assert len(problems) == (why is not None)
    for found in problems:
        assert any(part in found for part in why.split("|"))
