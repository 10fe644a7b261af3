"""The registry of metrics: the page is written from it, and every metric of a run has a meaning."""

from __future__ import annotations

import pytest

from miles_async.observability.metric_names import OTHER, describe, registry
from scripts.metrics_page import PAGE, page


def test_the_page_is_of_the_registry() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m scripts.metrics_page`"


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("reward/mean", "Samples", "mean reward"),
        ("rollout/finish_reason/length", "Samples", "shares of samples"),
        ("rollout/tool_errors/mean", "Samples", "environments"),
        ("age/count/7", "Age and accounting", "age N"),
        ("train/logprob_diff/age_8-15/p99", "Training", "tokens of age N"),
        ("train/logprob_diff_max", "Training", "numerical noise"),
        ("eval/gsm8k/pass@4", "Samples", "one of K"),
        ("publish/flush_seconds", "Publication", "other stages"),
    ],
)
def test_a_metric_has_the_meaning_of_its_row(name: str, section: str, words: str) -> None:
    found = describe(name)
    assert found.section == section
    assert words in found.meaning


def test_an_unknown_metric_is_shown_last() -> None:
    found = describe("my/own")
    assert (found.section, found.meaning) == (OTHER, "")
    assert found.section_rank == len(registry().sections)
