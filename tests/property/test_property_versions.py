"""Span parsing is nowhere fresher than the truth, whatever an engine reports that has a few tokens in flight.

# covers: C1, M1
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from miles_async.errors import VersionUnknownError
from miles_async.staleness.versions import VersionSpan, parse_spans, versions_per_token

OFF_BY_ONE = st.integers(-1, 1)
TOKENS_IN_FLIGHT = st.integers(1, 5)  # of one forward pass: speculative decoding verifies several


@st.composite
def true_versions(draw: st.DrawFn) -> tuple[int, list[int]]:
    """(version at dispatch, version of every token): weights get newer during a call, never older."""
    dispatch = draw(st.integers(0, 3))
    return dispatch, sorted(draw(st.lists(st.integers(dispatch, dispatch + 4), min_size=1, max_size=12)))


def spans_of(versions: list[int]) -> list[VersionSpan]:
    edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return [VersionSpan(versions[start], start, end) for start, end in pairwise(edges)]


def as_report(spans: list[VersionSpan], *, as_text: bool = True) -> list[dict[str, object]]:
    return [{"version": str(s.version) if as_text else s.version, "start": s.start, "end": s.end} for s in spans]


def assert_never_fresher(spans: tuple[VersionSpan, ...], truth: list[int]) -> None:
    parsed = versions_per_token(spans, len(truth))
    assert (parsed <= truth).all(), (parsed, truth)


@given(true_versions(), TOKENS_IN_FLIGHT, st.data())
def test_every_start_and_end_wrong_by_the_tokens_in_flight_at_most(
    case: tuple[int, list[int]], in_flight: int, data: st.DataObject
) -> None:
    dispatch, truth = case
    off = st.integers(-in_flight, in_flight)
    reported = [
        VersionSpan(span.version, span.start + (data.draw(off) if span.start else 0), span.end + data.draw(off))
        for span in spans_of(truth)
    ]
    as_text = data.draw(st.booleans())
    spans = parse_spans(as_report(reported, as_text=as_text), str(truth[-1]), len(truth), dispatch, in_flight)
    assert_never_fresher(spans, truth)


@given(TOKENS_IN_FLIGHT, st.data())
def test_no_token_in_flight_is_called_fresher_than_it_is(in_flight: int, data: st.DataObject) -> None:
    """An engine with SGLang's overlap schedule: a pass is launched before the results of the one before are counted,
    and weights change between two turns of its loop, as often as one likes."""
    version = dispatch = data.draw(st.integers(0, 3))
    truth: list[int] = []
    events: list[tuple[int, int]] = []  # as srt/utils/weight_versions.py: (old version, tokens counted when it changed)
    queued: list[int] = []  # versions of the tokens of the pass in flight
    for launches in data.draw(st.lists(st.booleans(), min_size=1, max_size=12)):
        if launches:
            launched = [version] * data.draw(st.integers(1, in_flight))
            truth, queued = truth + queued, launched
        else:
            if truth:
                events.append((version, len(truth)))
            version += 1
    truth += queued
    spans: list[VersionSpan] = []
    for old, count in [*events, (version, len(truth))]:
        start = spans[-1].end if spans else 0
        if not spans or count > start:
            spans.append(VersionSpan(old, start, count))
    assert_never_fresher(parse_spans(as_report(spans), str(version), len(truth), dispatch, in_flight), truth)


@given(true_versions(), st.data())
def test_engine_that_counts_tokens_in_flight_under_the_new_version(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    """SGLang's own construction (srt/utils/weight_versions.py), told at each change of weights a number of output
    tokens that is one too low or too high. A change before the first token was counted leaves no trace at all."""
    dispatch, truth = case
    changes = [(span.version, max(0, span.end + data.draw(OFF_BY_ONE))) for span in spans_of(truth)[:-1]]
    changes = [(version, count) for version, count in changes if count > 0] + [(truth[-1], len(truth))]
    spans: list[VersionSpan] = []
    for version, count in changes:
        end = min(count, len(truth))
        if spans and end <= spans[-1].end:
            continue
        spans.append(VersionSpan(version, spans[-1].end if spans else 0, end))
    assert_never_fresher(parse_spans(as_report(spans), str(truth[-1]), len(truth), dispatch), truth)


@given(true_versions(), st.data())
def test_report_with_a_hole_falls_back_to_the_oldest_version_in_sight(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    dispatch, truth = case
    assume(len(truth) >= 2)
    start = data.draw(st.integers(0, len(truth) - 2))
    end = data.draw(st.integers(start + 2, len(truth)))
    before = spans_of(truth[:start]) if start else []
    after = [VersionSpan(s.version, s.start + end, s.end + end) for s in spans_of(truth[end:])] if truth[end:] else []
    spans = parse_spans(as_report(before + after), str(truth[-1]), len(truth), dispatch)
    assert spans == (VersionSpan(dispatch, 0, len(truth)),)


@given(true_versions())
def test_exact_report_costs_one_token_per_edge_at_most(case: tuple[int, list[int]]) -> None:
    _, truth = case
    spans = parse_spans(as_report(spans_of(truth)), str(truth[-1]), len(truth), truth[0])
    wrong = (versions_per_token(spans, len(truth)) != truth).sum()
    assert wrong <= len(spans_of(truth)) - 1


@given(
    st.none()
    | st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(), st.lists)
    | st.lists(
        st.fixed_dictionaries(
            {}, optional={k: st.integers(-2, 9) | st.text() | st.none() for k in ("version", "start", "end")}
        )
    ),
    st.none() | st.integers(-2, 9) | st.text() | st.floats() | st.sampled_from(["default", "3", "-1", "٣", "9" * 99]),
    st.integers(0, 8),
)
def test_any_report_is_a_cover_or_an_unknown_version(spans: object, scalar: object, num_tokens: int) -> None:
    """Malformed values never crash and never count as fresh: the sample ends with VersionUnknownError."""
    try:
        parsed = parse_spans(spans, scalar, num_tokens, 3)
    except VersionUnknownError:
        return
    versions = versions_per_token(parsed, num_tokens)
    assert (versions >= 0).all()


@given(true_versions(), st.lists(st.integers(0, 14), max_size=5), TOKENS_IN_FLIGHT)
def test_the_first_token_is_never_labelled_newer_than_the_dispatch(
    case: tuple[int, list[int]], edges: list[int], in_flight: int
) -> None:
    """On which it rests that a request in flight tells how old its sample is at least (C5)."""
    dispatch, truth = case
    ends = [*sorted(edges), len(truth)]
    starts = [0, *ends[:-1]]
    reported = [
        VersionSpan(truth[min(start, len(truth) - 1)], start, end) for start, end in zip(starts, ends, strict=True)
    ]
    for report in (None, as_report(spans_of(truth)), as_report(reported)):
        assert parse_spans(report, str(truth[-1]), len(truth), dispatch, in_flight)[0].version <= dispatch
