"""Command lines that are refused."""

from __future__ import annotations

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.errors import ConfigurationError


def refusal(*words: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(words)
    return str(caught.value)
