"""From what an engine says about versions to what is believed.

# covers: C1, M1, M5
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from miles_async.errors import VersionUnknownError
from miles_async.staleness.versions import (
    MAX_VERSION,
    VersionSpan,
    group_of,
    is_mixed,
    loss_versions,
    oldest_version,
    parse_spans,
    versions_per_token,
)
from miles_async.types import NO_VERSION
from tests.property.builders import make_attempt, make_group, make_sample


def report(*spans: tuple[object, object, object]) -> list[dict[str, object]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def parsed(reported: object, scalar: object = "5", num_tokens: int = 6, dispatch: int = 3) -> list[int]:
    return versions_per_token(parse_spans(reported, scalar, num_tokens, dispatch), num_tokens).tolist()


def test_one_span_from_the_version_at_dispatch_is_taken_as_it_is() -> None:
    assert parse_spans(report(("3", 0, 6)), "3", 6, 3) == (VersionSpan(3, 0, 6),)


def test_versions_may_be_integers() -> None:
    assert parsed(report((3, 0, 6)), scalar=3) == [3] * 6


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        pytest.param(report(("3", 0, 2), ("4", 2, 6)), [3, 3, 3, 4, 4, 4], id="edge"),
        pytest.param(report(("3", 0, 2), ("4", 2, 3), ("5", 3, 6)), [3, 3, 3, 4, 5, 5], id="span of one token"),
        pytest.param(report(("3", 0, 2), ("4", 2, 2), ("5", 2, 6)), [3, 3, 3, 5, 5, 5], id="span of no token"),
        pytest.param(report(("3", 0, 5), ("4", 5, 6)), [3] * 6, id="last span of one token"),
        pytest.param(report(("3", 0, 2), ("3", 2, 6)), [3] * 6, id="no edge between equal versions"),
        pytest.param(report(("3", 0, 2), ("4", 3, 6)), [3, 3, 3, 3, 4, 4], id="gap of one: the later edge"),
        pytest.param(report(("3", 0, 3), ("4", 2, 6)), [3, 3, 3, 3, 4, 4], id="overlap of one: the later edge"),
    ],
)
def test_at_an_edge_the_earlier_version_is_the_truth(reported: object, expected: list[int]) -> None:
    assert parsed(reported) == expected


def test_start_of_the_call_is_an_edge_if_weights_changed_since_dispatch() -> None:
    """A prefill in flight during an update in place: SGLang reports its token under the new version."""
    assert parsed(report(("4", 0, 6)), dispatch=3) == [3, 4, 4, 4, 4, 4]


def test_span_older_than_the_version_at_dispatch_is_believed() -> None:
    assert parsed(report(("2", 0, 6)), dispatch=3) == [2] * 6


@pytest.mark.parametrize("end", [5, 6, 7])
def test_end_may_be_off_by_one(end: int) -> None:
    assert parsed(report(("3", 0, 2), ("4", 2, end))) == [3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    "reported",
    [
        pytest.param(report(("4", 0, 2), ("5", 2, 4)), id="two tokens short"),
        pytest.param(report(("4", 0, 2), ("5", 2, 8)), id="two tokens long"),
        pytest.param(report(("4", 1, 6)), id="first token missing"),
        pytest.param(report(("4", 0, 1), ("5", 3, 6)), id="gap of two"),
        pytest.param(report(("5", 0, 3), ("4", 3, 6)), id="getting older"),
        pytest.param(report(("4", 0, None)), id="end unreadable"),
        pytest.param(report(("4", 6, 0)), id="backwards"),
        pytest.param([], id="no spans"),
        pytest.param(None, id="absent (older engines)"),
        pytest.param("4", id="not spans at all"),
    ],
)
def test_unbelievable_spans_fall_back_to_the_oldest_version_in_sight(reported: object) -> None:
    assert parsed(reported, scalar="5", dispatch=3) == [3] * 6


def test_fallback_takes_the_label_and_unbelievable_spans_if_they_are_older() -> None:
    assert parsed(None, scalar="2", dispatch=3) == [2] * 6
    assert parsed(report(("1", 0, 2)), scalar="2", dispatch=3) == [1] * 6


@pytest.mark.parametrize("unusable", [None, "default", "", "-1", -1, "3.0", 3.0, True, "three", "٣", "9" * 40, 10**12])
def test_unusable_version_is_an_error_never_fresh(unusable: object) -> None:
    with pytest.raises(VersionUnknownError, match="expected a version from 0"):
        parse_spans(None, unusable, 6, 3)
    with pytest.raises(VersionUnknownError, match="expected a version from 0"):
        parse_spans(report(("3", 0, 3), (unusable, 3, 6)), "4", 6, 3)


@pytest.mark.parametrize("newest", [MAX_VERSION, str(MAX_VERSION)])
def test_the_largest_version_is_one(newest: object) -> None:
    assert parse_spans(None, newest, 6, MAX_VERSION) == (VersionSpan(MAX_VERSION, 0, 6),)


def test_a_version_that_arrays_cannot_hold_is_an_error() -> None:
    with pytest.raises(VersionUnknownError, match=f"from 0 to {MAX_VERSION}"):
        parse_spans(report((str(MAX_VERSION + 1), 0, 6)), "5", 6, 3)


def test_unknown_version_at_dispatch_is_an_error() -> None:
    with pytest.raises(VersionUnknownError, match="as dispatch"):
        parse_spans(None, "3", 6, -1)


def test_no_tokens_no_spans() -> None:
    assert parse_spans(report(("3", 0, 0)), "default", 0, 3) == ()
    assert versions_per_token((), 0).tolist() == []


def test_age_is_decided_by_the_oldest_token_that_carries_loss() -> None:
    sample = make_sample([1, 4, NO_VERSION, 5], prompt_length=1)  # masked out, turn, tool, turn
    sample = structs.replace(sample, loss_mask=np.array([0, 0, 1, 0, 1], dtype=np.uint8))
    assert loss_versions(sample).tolist() == [4, 5]
    assert oldest_version(sample) == 4
    assert is_mixed(sample)
    assert not is_mixed(structs.replace(sample, loss_mask=np.array([0, 0, 0, 0, 1], dtype=np.uint8)))


def test_a_sample_is_as_old_as_the_oldest_of_its_branches() -> None:
    sample = make_sample([4, 5], more_branches=[[6], [3]])
    assert loss_versions(sample).tolist() == [4, 5, 6, 3]
    assert oldest_version(sample) == 3
    assert is_mixed(make_sample([4], more_branches=[[5]]))
    group = group_of(make_attempt(), [sample])
    assert (group.oldest_version, group.newest_version) == (3, 6)


def test_sample_without_loss_tokens_has_no_age() -> None:
    with pytest.raises(VersionUnknownError, match="at least one token"):
        oldest_version(make_sample([NO_VERSION]))


def test_branch_without_loss_tokens_has_no_age() -> None:
    with pytest.raises(VersionUnknownError, match="at least one token"):
        oldest_version(make_sample([3], more_branches=[[4], [NO_VERSION]]))


def test_loss_token_without_version_is_an_error() -> None:
    with pytest.raises(VersionUnknownError, match="found one without"):
        oldest_version(structs.replace(make_sample([3, NO_VERSION], prompt_length=0), loss_mask=np.ones(2, np.uint8)))


def test_group_is_as_old_as_its_oldest_sample() -> None:
    group = make_group(0, [[5, 6], [3, 4], [6, 7]])
    assert (group.oldest_version, group.newest_version) == (3, 7)


def test_an_engine_with_more_tokens_in_flight_keeps_more_of_them_with_the_earlier_version() -> None:
    reported = report(("3", 0, 2), ("4", 2, 6))
    versions = [versions_per_token(parse_spans(reported, "4", 6, 3, d), 6).tolist() for d in (1, 2, 3, 1 << 31)]
    assert versions == [[3, 3, 3, 4, 4, 4], [3, 3, 3, 3, 4, 4], [3, 3, 3, 3, 3, 4], [3] * 6]
