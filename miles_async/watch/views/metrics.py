"""The metrics of runs: names by section with their meaning, and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_async.observability.metric_names import describe
from miles_async.types import JsonObject
from miles_async.watch.metrics_table import down_sampled, encoded_series, stretch_means, within
from miles_async.watch.run import Run

MOST_POINTS = 4_000
MOST_NAMES = 500  # of one request


def names(runs: Sequence[Run]) -> JsonObject:
    """{"sections": [{"title", "metrics": [{"name", "unit", "meaning", "worries", "last": [one per run]}]}]}, as
    the registry orders.
    """
    for run in runs:
        run.metrics.refresh()
    known = sorted({name for run in runs for name in run.metrics.names})
    sections: dict[str, list[tuple[int, JsonObject]]] = {}
    ranks: dict[str, int] = {}
    for name in known:
        found = describe(name)
        ranks.setdefault(found.section, found.section_rank)
        last = [run.metrics.last(name) for run in runs]
        entry = {"name": name, "unit": found.unit, "meaning": found.meaning, "worries": found.worries, "last": last}
        sections.setdefault(found.section, []).append((found.rank, entry))
    return {
        "sections": [
            {"title": title, "metrics": [entry for _, entry in sorted(sections[title], key=lambda pair: pair[0])]}
            for title in sorted(sections, key=lambda title: ranks[title])
        ]
    }


def series(
    run: Run, wanted: Sequence[str], *, points: int, low: float = -math.inf, high: float = math.inf
) -> JsonObject:
    """Name → {"steps", "values"}, at most ``points`` each, within steps [low, high]; and "means" of stretches, in the
    same form, if values are left out.
    """
    run.metrics.refresh()
    points = max(2, min(points, MOST_POINTS))
    found: dict[str, object] = {}
    for name in wanted[:MOST_NAMES]:
        wanted_part = within(run.metrics.series(name), low, high)
        means = stretch_means(wanted_part, points)
        left_out = {} if means is None else {"means": encoded_series(means)}
        found[name] = {**encoded_series(down_sampled(wanted_part, points)), **left_out}
    return found
