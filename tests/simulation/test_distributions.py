"""How long things take, as it is written on a command line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.simulation.distributions import Fixed, LogNormal, Trace, median, parse_distribution


def test_distributions_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("# seconds\n1.5\n\n3\n")
    assert parse_distribution("2.5", "--train-seconds") == Fixed(2.5)
    assert parse_distribution("fixed:2", "--train-seconds") == Fixed(2.0)
    assert parse_distribution("lognormal:20:0.5", "--latency") == LogNormal(20.0, 0.5)
    assert parse_distribution("lognormal:20:0.5:100", "--latency") == LogNormal(20.0, 0.5, 100.0)
    assert parse_distribution(f"trace:{tmp_path / 'trace.txt'}", "--latency") == Trace((1.5, 3.0))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "fixed:",
        "-1",
        "nan",
        "lognormal:20",
        "lognormal:0:1",
        "lognormal:1:-1",
        "1e308",
        "lognormal:1:1e308",
        "lognormal:1e308:5",
        "normal:1:2",
    ],
)
def test_anything_else_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--latency"):
        parse_distribution(text, "--latency")


@pytest.mark.parametrize(("content", "message"), [("", "no seconds"), ("1\nx\n", "line 2"), ("-1\n", "line 1")])
def test_a_trace_that_cannot_be_read_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "trace.txt").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        parse_distribution(f"trace:{tmp_path / 'trace.txt'}", "--latency")


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--latency trace:"):
        parse_distribution(f"trace:{tmp_path / 'none'}", "--latency")


def test_a_lognormal_has_its_median_and_its_longest() -> None:
    assert median(LogNormal(20.0, 1.0)) == pytest.approx(20, rel=0.1)
    chance = random.Random(1)
    assert max(LogNormal(20.0, 1.0, 50.0).draw(chance) for _ in range(1000)) == 50
