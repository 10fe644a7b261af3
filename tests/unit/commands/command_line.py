"""``miles-async`` as a user calls it."""

from __future__ import annotations

import pytest

from miles_async.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Run a command that ends with ``code``; return its stdout, or its stderr if it fails."""
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    return printed(capsys, *words, code=2)
