"""Flags that are refused."""

from __future__ import annotations

import pytest

from miles_async.arguments.parser import assemble, parse_arguments
from miles_async.arguments.validation import validate
from miles_async.errors import ConfigurationError


def refusal(*words: str) -> str:
    """Why a command line cannot be read."""
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(words)
    return str(caught.value)


def refusal_of(values: dict[str, object]) -> str:
    """Why a run with these flags, by field, cannot work."""
    with pytest.raises(ConfigurationError) as caught:
        validate(assemble(values, {}))
    return str(caught.value)
