"""The figure of the study: a heat map per quantity, with a row per correction and a column per age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Rows = Sequence[Sequence[float | None]]
"""[correction][age]; None where nothing was measured."""
LIGHT_BELOW = 0.6  # of a panel's range: numbers on darker ground are white


def draw(panels: Mapping[str, Rows], rows: Sequence[str], ages: Sequence[int], path: Path) -> None:
    """Draw ``panels``, by title, side by side into ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and no display is needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 + 3.1 * len(panels), 1.2 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(grid, panels.items(), strict=True):
        numbers = np.array([[np.nan if value is None else value for value in row] for row in values], float)
        measured = numbers[~np.isnan(numbers)]
        top = 1.0 if measured.size and measured.max() <= 1 else max(measured.max(initial=1.0), 1.0)
        axes.imshow(numbers, cmap="Blues", vmin=0, vmax=top, aspect="auto")
        for (row, column), value in np.ndenumerate(numbers):
            if not np.isnan(value):
                color = "white" if value > LIGHT_BELOW * top else "#222222"
                text = f"{value:.2f}" if top == 1.0 else f"{value:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
        axes.set_title(title, fontsize="medium")
        axes.set_xticks(range(len(ages)), [str(age) for age in ages])
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("age in versions")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=150)
