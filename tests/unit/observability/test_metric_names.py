"""The registry of metrics: the site's tables are made from it, and every metric of a run has a meaning."""

from __future__ import annotations

import re

import pytest

from miles_async.observability.metric_names import OTHER, describe, names_in, sections
from scripts.docs_site import metrics_tables


def test_the_tables_have_a_row_for_every_metric() -> None:
    lines = metrics_tables().splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == [section.title for section in sections()]
    cells = [
        line.strip("|").split("|") for line in lines if line.startswith("| ") and "| look closer when |" not in line
    ]
    rows = [row for section in sections() for row in section.rows]
    assert [(first.strip(), unit.strip()) for first, unit, *_ in cells] == [(row.names, row.unit) for row in rows]
    assert {len(row) for row in cells} == {4}


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("reward/mean", "Samples", "mean reward"),
        ("rollout/finish_reason/length", "Samples", "ended this way"),
        ("rollout/tool_errors/mean", "Samples", "environments"),
        ("age/count/7", "Age and accounting", "age N"),
        ("train/logprob_diff/age_8-15/p99", "Training", "tokens of age N"),
        ("train/logprob_diff_max", "Training", "numerical noise"),
        ("eval/gsm8k/pass@4", "Samples", "one of K"),
        ("publish/flush_seconds", "Publication", "other stages"),
        ("eval/gsm8k/response_length/max", "Samples", "length of answers"),
    ],
)
def test_a_metric_has_the_meaning_of_its_row(name: str, section: str, words: str) -> None:
    found = describe(name)
    assert found.section == section
    assert words in found.meaning


def test_units_agree_with_names() -> None:
    """A row that mixes units would tell a page or an alert the wrong one."""
    units = {name: row.unit for section in sections() for row in section.rows for name in names_in(row.names)}
    expected = {
        "_seconds": "seconds",
        "_fraction": "share",
        "_ratio": "share",
        "bytes": "bytes",
        "_percentage": "percent",
    }
    expected |= {"/tokens": "tokens", "_tokens": "tokens", "_tensors": "tensors", "_requests": "requests"}
    found = {name: unit for name, unit in units.items() for end in expected if name.endswith(end)}
    assert len(found) > 30
    assert found == {name: unit for name in found for end, unit in expected.items() if name.endswith(end)}


def test_what_worries_names_metrics_that_exist() -> None:
    named = {name for section in sections() for row in section.rows for name in _metrics_in(row.worries)}
    assert "train/rollout_kl_k3" in named
    assert not [name for name in named if not describe(name).meaning]


def _metrics_in(text: str) -> list[str]:
    return [word for word in re.findall(r"`([^`]+)`", text) if re.fullmatch(r"[a-z_]+(/\w+)+", word)]


def test_an_unknown_metric_is_shown_last() -> None:
    found = describe("my/own")
    assert (found.section, found.meaning, found.worries) == (OTHER, "", "")
    assert found.section_rank == len(sections())
