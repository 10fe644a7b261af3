"""Which cases of a file are to be tested, so that ranks observe those and no others."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Values of ``parameter`` in the selected tests of the file, each once, in order."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    values = [_parameters(item)[parameter] for item in tests if parameter in _parameters(item)]
    return list(dict.fromkeys(values))


def _parameters(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}  # absent where nothing is parametrized
